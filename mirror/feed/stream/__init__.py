"""One vbucket's stream: it feeds the vbucket's machine and executes the machine's instructions on a sink."""
