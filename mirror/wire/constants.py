"""Named numbers of the memcached binary protocol and of DCP, and bounds on lengths.

A number without a name here is no error, because frames hold plain ints. Sources: kv_engine docs/BinaryProtocol.md,
docs/dcp/documentation/commands/*, docs/Collections.md.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

HEADER_SIZE = 24

BODY_LENGTH_MAX = 32 * 1024 * 1024
"""Largest accepted body: a 20 MiB document, 1 MiB of system xattrs, and a reserve for keys, extras, compression and the
largest cluster configurations. A header that claims more is an error before its body arrives.
"""

DCP_NAME_LENGTH_MAX = 200
"""Bytes of the longest name of a DCP connection (open-connection.md)."""

FAILOVER_LOG_LENGTH_MAX = 4096
"""Entries of the longest accepted failover log. Servers keep 25 by default."""


class Magic(IntEnum):
    REQUEST = 0x80
    RESPONSE = 0x81
    FLEX_REQUEST = 0x08
    FLEX_RESPONSE = 0x18
    SERVER_REQUEST = 0x82
    SERVER_RESPONSE = 0x83


class Opcode(IntEnum):
    GET = 0x00
    SET = 0x01
    ADD = 0x02
    REPLACE = 0x03
    DELETE = 0x04
    INCREMENT = 0x05
    DECREMENT = 0x06
    QUIT = 0x07
    FLUSH = 0x08
    GETQ = 0x09
    NOOP = 0x0A
    VERSION = 0x0B
    GETK = 0x0C
    GETKQ = 0x0D
    APPEND = 0x0E
    PREPEND = 0x0F
    STAT = 0x10
    SETQ = 0x11
    ADDQ = 0x12
    REPLACEQ = 0x13
    DELETEQ = 0x14
    INCREMENTQ = 0x15
    DECREMENTQ = 0x16
    QUITQ = 0x17
    FLUSHQ = 0x18
    APPENDQ = 0x19
    PREPENDQ = 0x1A
    VERBOSITY = 0x1B
    TOUCH = 0x1C
    GAT = 0x1D
    GATQ = 0x1E
    HELLO = 0x1F
    SASL_LIST_MECHS = 0x20
    SASL_AUTH = 0x21
    SASL_STEP = 0x22
    GET_VBUCKET = 0x3E
    GET_ALL_VB_SEQNOS = 0x48
    MUTATE_WITH_META = 0x4B
    DCP_OPEN = 0x50
    DCP_ADD_STREAM = 0x51
    DCP_CLOSE_STREAM = 0x52
    DCP_STREAM_REQ = 0x53
    DCP_GET_FAILOVER_LOG = 0x54
    DCP_STREAM_END = 0x55
    DCP_SNAPSHOT_MARKER = 0x56
    DCP_MUTATION = 0x57
    DCP_DELETION = 0x58
    DCP_EXPIRATION = 0x59
    DCP_FLUSH = 0x5A
    DCP_SET_VBUCKET_STATE = 0x5B
    DCP_NOOP = 0x5C
    DCP_BUFFER_ACK = 0x5D
    DCP_CONTROL = 0x5E
    DCP_SYSTEM_EVENT = 0x5F
    DCP_PREPARE = 0x60
    DCP_SEQNO_ACKNOWLEDGED = 0x61
    DCP_COMMIT = 0x62
    DCP_ABORT = 0x63
    DCP_SEQNO_ADVANCED = 0x64
    DCP_OSO_SNAPSHOT = 0x65
    DCP_CACHE_TRANSFER = 0x66
    DCP_CACHE_TRANSFER_END = 0x67
    GET_REPLICA = 0x83
    LIST_BUCKETS = 0x87
    SELECT_BUCKET = 0x89
    OBSERVE_SEQNO = 0x91
    OBSERVE = 0x92
    GET_LOCKED = 0x94
    UNLOCK_KEY = 0x95
    GET_FAILOVER_LOG = 0x96
    GET_META = 0xA0
    GETQ_META = 0xA1
    SET_WITH_META = 0xA2
    SETQ_WITH_META = 0xA3
    ADD_WITH_META = 0xA4
    ADDQ_WITH_META = 0xA5
    DEL_WITH_META = 0xA8
    DELQ_WITH_META = 0xA9
    GET_CLUSTER_CONFIG = 0xB5
    GET_RANDOM_KEY = 0xB6
    SEQNO_PERSISTENCE = 0xB7
    GET_KEYS = 0xB8
    SET_COLLECTIONS_MANIFEST = 0xB9
    GET_COLLECTIONS_MANIFEST = 0xBA
    GET_COLLECTION_ID = 0xBB
    GET_SCOPE_ID = 0xBC
    SUBDOC_GET = 0xC5
    SUBDOC_EXISTS = 0xC6
    SUBDOC_DICT_ADD = 0xC7
    SUBDOC_DICT_UPSERT = 0xC8
    SUBDOC_DELETE = 0xC9
    SUBDOC_REPLACE = 0xCA
    SUBDOC_ARRAY_PUSH_LAST = 0xCB
    SUBDOC_ARRAY_PUSH_FIRST = 0xCC
    SUBDOC_ARRAY_INSERT = 0xCD
    SUBDOC_ARRAY_ADD_UNIQUE = 0xCE
    SUBDOC_COUNTER = 0xCF
    SUBDOC_MULTI_LOOKUP = 0xD0
    SUBDOC_MULTI_MUTATION = 0xD1
    SUBDOC_GET_COUNT = 0xD2
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0xD3
    RANGE_SCAN_CREATE = 0xDA
    RANGE_SCAN_CONTINUE = 0xDB
    RANGE_SCAN_CANCEL = 0xDC
    GET_ERROR_MAP = 0xFE


SUBDOC_CHANGES = (
    Opcode.SUBDOC_DICT_ADD,
    Opcode.SUBDOC_DICT_UPSERT,
    Opcode.SUBDOC_DELETE,
    Opcode.SUBDOC_REPLACE,
    Opcode.SUBDOC_ARRAY_PUSH_LAST,
    Opcode.SUBDOC_ARRAY_PUSH_FIRST,
    Opcode.SUBDOC_ARRAY_INSERT,
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE,
    Opcode.SUBDOC_COUNTER,
    Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR,
)
"""Requests that change one path of a document (kv_engine docs/SubDocument.md)."""


class ServerOpcode(IntEnum):
    """Second byte of a frame with magic SERVER_REQUEST or SERVER_RESPONSE (Duplex.md)."""

    CLUSTERMAP_CHANGE_NOTIFICATION = 0x01


class Status(IntEnum):
    SUCCESS = 0x00
    KEY_ENOENT = 0x01
    KEY_EEXISTS = 0x02
    E2BIG = 0x03
    EINVAL = 0x04
    NOT_STORED = 0x05
    DELTA_BADVAL = 0x06
    NOT_MY_VBUCKET = 0x07
    NO_BUCKET = 0x08
    LOCKED = 0x09
    DCP_STREAM_NOT_FOUND = 0x0A
    OPAQUE_NO_MATCH = 0x0B
    WOULD_THROTTLE = 0x0C
    CONFIG_ONLY = 0x0D
    NOT_LOCKED = 0x0E
    CAS_VALUE_INVALID = 0x0F
    AUTH_STALE = 0x1F
    AUTH_ERROR = 0x20
    AUTH_CONTINUE = 0x21
    ERANGE = 0x22
    ROLLBACK = 0x23
    EACCESS = 0x24
    NOT_INITIALIZED = 0x25
    ENCRYPTION_KEY_NOT_AVAILABLE = 0x26
    CHECKSUM_MISMATCH = 0x27
    EXPIRY_OVERFLOW = 0x28
    LOCK_EXPIRY_OVERFLOW = 0x29
    RATE_LIMITED_NETWORK_INGRESS = 0x30
    RATE_LIMITED_NETWORK_EGRESS = 0x31
    RATE_LIMITED_MAX_CONNECTIONS = 0x32
    RATE_LIMITED_MAX_COMMANDS = 0x33
    BUCKET_SIZE_LIMIT_EXCEEDED = 0x35
    BUCKET_PAUSED = 0x50
    CANCELLED = 0x51
    UNKNOWN_FRAME_INFO = 0x80
    UNKNOWN_COMMAND = 0x81
    ENOMEM = 0x82
    NOT_SUPPORTED = 0x83
    EINTERNAL = 0x84
    EBUSY = 0x85
    ETMPFAIL = 0x86
    XATTR_EINVAL = 0x87
    UNKNOWN_COLLECTION = 0x88
    CANNOT_APPLY_COLLECTIONS_MANIFEST = 0x8A
    UNKNOWN_SCOPE = 0x8C
    DCP_STREAM_ID_INVALID = 0x8D
    DURABILITY_INVALID_LEVEL = 0xA0
    DURABILITY_IMPOSSIBLE = 0xA1
    SYNC_WRITE_IN_PROGRESS = 0xA2
    SYNC_WRITE_AMBIGUOUS = 0xA3
    SYNC_WRITE_RE_COMMIT_IN_PROGRESS = 0xA4
    RANGE_SCAN_CANCELLED = 0xA5
    RANGE_SCAN_MORE = 0xA6
    RANGE_SCAN_COMPLETE = 0xA7
    VB_UUID_NOT_EQUAL = 0xA8
    SUBDOC_PATH_ENOENT = 0xC0
    SUBDOC_PATH_MISMATCH = 0xC1
    SUBDOC_PATH_EINVAL = 0xC2
    SUBDOC_PATH_E2BIG = 0xC3
    SUBDOC_DOC_E2DEEP = 0xC4
    SUBDOC_VALUE_CANTINSERT = 0xC5
    SUBDOC_DOC_NOT_JSON = 0xC6
    SUBDOC_NUM_ERANGE = 0xC7
    SUBDOC_DELTA_EINVAL = 0xC8
    SUBDOC_PATH_EEXISTS = 0xC9
    SUBDOC_VALUE_ETOODEEP = 0xCA
    SUBDOC_INVALID_COMBO = 0xCB
    SUBDOC_MULTI_PATH_FAILURE = 0xCC
    SUBDOC_SUCCESS_DELETED = 0xCD
    SUBDOC_XATTR_INVALID_FLAG_COMBO = 0xCE
    SUBDOC_XATTR_INVALID_KEY_COMBO = 0xCF
    SUBDOC_XATTR_UNKNOWN_MACRO = 0xD0
    SUBDOC_XATTR_UNKNOWN_VATTR = 0xD1
    SUBDOC_XATTR_CANT_MODIFY_VATTR = 0xD2
    SUBDOC_MULTI_PATH_FAILURE_DELETED = 0xD3
    SUBDOC_INVALID_XATTR_ORDER = 0xD4
    SUBDOC_XATTR_UNKNOWN_VATTR_MACRO = 0xD5
    SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS = 0xD6
    SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE = 0xD7


class Datatype(IntFlag):
    """SNAPPY: the whole value is compressed, xattrs included."""

    RAW = 0x00
    JSON = 0x01
    SNAPPY = 0x02
    XATTR = 0x04


class Feature(IntEnum):
    TLS = 0x02
    TCP_NODELAY = 0x03
    MUTATION_SEQNO = 0x04
    XATTR = 0x06
    XERROR = 0x07
    SELECT_BUCKET = 0x08
    SNAPPY = 0x0A
    JSON = 0x0B
    DUPLEX = 0x0C
    CLUSTERMAP_CHANGE_NOTIFICATION = 0x0D
    UNORDERED_EXECUTION = 0x0E
    TRACING = 0x0F
    ALT_REQUEST = 0x10
    SYNC_REPLICATION = 0x11
    COLLECTIONS = 0x12
    PRESERVE_TTL = 0x14
    VATTR = 0x15
    SUBDOC_CREATE_AS_DELETED = 0x17
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0x19
    SUBDOC_REPLICA_READ = 0x1C
    GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION = 0x1D
    DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP = 0x1E
    CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF = 0x1F
    RANGE_SCAN_INCLUDE_XATTR = 0x22
    MUTATE_WITH_META = 0x25
    MIRROR = 0xDC00
    """An addition of this project (docs/protocol.md 4.7): a mirror grants it, a Couchbase server does not."""


class FrameInfoId(IntEnum):
    """Kinds of frame info in the framing extras of a request (BinaryProtocol.md)."""

    DURABILITY = 1
    DCP_STREAM_ID = 2
    PRESERVE_TTL = 5


class DcpOpenFlag(IntFlag):
    PRODUCER = 0x01
    INCLUDE_XATTRS = 0x04
    NO_VALUE = 0x08
    INCLUDE_DELETE_TIMES = 0x20
    NO_VALUE_WITH_UNDERLYING_DATATYPE = 0x40
    INCLUDE_DELETED_USER_XATTRS = 0x100


class StreamRequestFlag(IntFlag):
    TAKEOVER = 0x01
    DISK_ONLY = 0x02
    TO_LATEST = 0x04
    NO_VALUE = 0x08
    ACTIVE_VB_ONLY = 0x10
    STRICT_VBUUID = 0x20
    FROM_LATEST = 0x40
    IGNORE_PURGED_TOMBSTONES = 0x80
    CACHE_TRANSFER = 0x100


class SnapshotFlag(IntFlag):
    MEMORY = 0x01
    DISK = 0x02
    CHECKPOINT = 0x04
    ACK = 0x08
    HISTORY = 0x10
    MAY_DUPLICATE_KEYS = 0x20


class MarkerVersion(IntEnum):
    """Shape of a snapshot marker on the wire. V1 has extras of 20 bytes. The others, in this order, have one byte of
    extras (0, 1, 2, 2) and a value of 36, 44, 52, 44 bytes. V2_1 is in no release; V2_2_SHORT, called V2.2 in some
    documents, lacks the high prepared seqno.
    """

    V1 = 10
    V2_0 = 20
    V2_1 = 21
    V2_2 = 22
    V2_2_SHORT = 122


class StreamEndReason(IntEnum):
    """Whatever the reason, the source may have rolled back: the next stream request needs the complete position. After
    FILTER_EMPTY and LOST_PRIVILEGES do not send this request at once (docs/protocol.md 2.10).
    """

    OK = 0
    CLOSED = 1
    STATE_CHANGED = 2
    DISCONNECTED = 3
    SLOW = 4
    BACKFILL_FAIL = 5
    ROLLBACK = 6
    FILTER_EMPTY = 7
    LOST_PRIVILEGES = 8


class SystemEventId(IntEnum):
    """Kinds of DCP_SYSTEM_EVENT. COLLECTION_BEGIN creates a collection, or flushes a known one."""

    COLLECTION_BEGIN = 0
    COLLECTION_END = 1
    SCOPE_CREATE = 3
    SCOPE_DROP = 4
    COLLECTION_MODIFY = 5


class VbucketRole(IntEnum):
    """State of a vbucket on a node. ALIVE stands for active, replica and pending, in GET_ALL_VB_SEQNOS only."""

    ALIVE = 0
    ACTIVE = 1
    REPLICA = 2
    PENDING = 3
    DEAD = 4


CONTACT_STATISTIC = b"contact"
"""A STAT group that only mirrors have (docs/protocol.md 4.7): the vbuckets without contact with the source."""


class ControlKey:
    """Names of the settings of DCP_CONTROL (control.md; docs/protocol.md 2.3)."""

    ENABLE_NOOP = b"enable_noop"
    SET_NOOP_INTERVAL = b"set_noop_interval"
    CONNECTION_BUFFER_SIZE = b"connection_buffer_size"
    SET_PRIORITY = b"set_priority"
    SUPPORTS_CURSOR_DROPPING = b"supports_cursor_dropping"
    SUPPORTS_CURSOR_DROPPING_VULCAN = b"supports_cursor_dropping_vulcan"
    FORCE_VALUE_COMPRESSION = b"force_value_compression"
    SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM = b"send_stream_end_on_client_close_stream"
    SUPPORTS_HIFI_MFU = b"supports_hifi_MFU"
    ENABLE_EXPIRY_OPCODE = b"enable_expiry_opcode"
    ENABLE_STREAM_ID = b"enable_stream_id"
    ENABLE_SYNC_WRITES = b"enable_sync_writes"
    CONSUMER_NAME = b"consumer_name"
    BACKFILL_ORDER = b"backfill_order"
    INCLUDE_DELETED_USER_XATTRS = b"include_deleted_user_xattrs"
    ENABLE_OUT_OF_ORDER_SNAPSHOTS = b"enable_out_of_order_snapshots"
    V7_DCP_STATUS_CODES = b"v7_dcp_status_codes"
    CHANGE_STREAMS = b"change_streams"
    FLATBUFFERS_SYSTEM_EVENTS = b"flatbuffers_system_events"
    MAX_MARKER_VERSION = b"max_marker_version"


_OPCODE_NAMES = {int(opcode): opcode.name for opcode in Opcode}
_STATUS_NAMES = {int(status): status.name for status in Status}


def opcode_name(opcode: int) -> str:
    return _OPCODE_NAMES.get(opcode, f"0x{opcode:02x}")


def status_name(status: int) -> str:
    return _STATUS_NAMES.get(status, f"0x{status:02x}")
