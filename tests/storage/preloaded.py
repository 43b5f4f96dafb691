"""What a forkserver imports before it forks: a module that has a view open, and reads it."""

import os

from storage.read.view import open_view
from tests.storage.forking import KEYS

VIEW = open_view(os.environ["PRELOADED_MIRROR"], partial=True)
DOCUMENT = VIEW.get(KEYS[0])
