"""The `quantbench` command; also `python -m quantbench`. The one place where errors become exit codes."""

import gc
import sys

from quantbench.errors import QuantbenchError

# As a shell reports a program that SIGPIPE ended.
_NO_READER = 128 + 13
# Objects made before the collector looks for cycles. A run of 100,000 records is millions of objects without any, and
# the default of 700 spends a third of the time on them.
_COLLECT_AFTER = 100_000


def main() -> None:
    """Run the command line. Exit codes: 0 fine, 1 something was found, 2 wrong use or bad input, 130 Ctrl-C, 141 when
    the reader of the output went away: whatever was found then, nobody saw it, and a gate must not pass."""
    from quantbench.cli.app import app

    gc.set_threshold(_COLLECT_AFTER, 50, 100)
    try:
        app(prog_name="quantbench")
    except QuantbenchError as error:
        print(f"quantbench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone (`quantbench … | head`)
        sys.stderr.close()
        sys.exit(_NO_READER)
    except SystemExit as end:
        # rich and click turn the same into 1, which with us means that something was found.
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(_NO_READER)
        raise


if __name__ == "__main__":
    main()
