"""The program that renders a chat template: code from a stranger, in a process of its own that has bounds.

w4conv.runtime.chat starts it by its path, `python -I -S template_process.py`, and talks to it through pipes. A message
is its length in 4 bytes, then JSON. In: {"path": sys.path}, then {"source": template}, then as often as wanted
{"values": variables}. Out: {"ready": true}, and for each later one {"done": true} after any number of {"piece": text},
or {"error": kind, "text": message}.

Nothing here trusts the template: jinja2's sandbox keeps it from Python, and what gets past it finds a process that may
not open, write or start anything, has MEMORY_NBYTES beyond what it began with, and CPU_SECONDS for each message.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, cast

MEMORY_NBYTES = 32 << 20
CPU_SECONDS = 1.0
FLUSH_NBYTES = 1 << 18


def main() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # who started this decides when it ends: by closing the pipe
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # by which the system ends what takes too long
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    source, sink = os.fdopen(0, "rb"), cast(BinaryIO, os.fdopen(1, "wb", 0))
    sys.path[:] = receive(source)["path"]
    render = prepare()
    confine()
    send(sink, ready=True)
    template: Any = None
    while message := receive(source):
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            if template is None:
                template = render.compile(message["source"])
            else:
                pieces, n = [], 0
                for piece in template.generate(message["values"]):
                    pieces.append(piece)
                    n += len(piece) + 64
                    if n > FLUSH_NBYTES:
                        send(sink, piece="".join(pieces))
                        pieces, n = [], 0
                send(sink, piece="".join(pieces))
            answer: dict[str, Any] = {"done": True}
        except render.refused as error:
            answer = {"error": "refused", "text": str(error)}
        except MemoryError:
            answer = {"error": "memory", "text": ""}
        except BrokenPipeError:
            return
        except BaseException as error:  # every error of the template's code is the template's
            answer = {"error": type(error).__name__, "text": str(error)[:1000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sink, **answer)


def confine() -> None:
    """Less than this process needs to do harm. What rendering imports has been imported."""
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), MEMORY_NBYTES)
    limits = {
        resource.RLIMIT_DATA: data + MEMORY_NBYTES,
        resource.RLIMIT_NOFILE: 0,  # open files stay open
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for what, limit in limits.items():
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))


def receive(source: BinaryIO) -> Any:
    """One message; None at the end."""
    length = source.read(4)
    return json.loads(source.read(int.from_bytes(length, "little"))) if len(length) == 4 else None


def send(sink: BinaryIO, **message: Any) -> None:
    data = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
    data = len(data).to_bytes(4, "little") + data
    while data:
        data = data[sink.write(data) :]


def prepare() -> Any:
    """jinja2 as transformers sets it up."""
    import datetime
    import html  # noqa: F401
    import pprint  # noqa: F401  # this and what follows, filters import when they are used
    import random  # noqa: F401
    import string  # noqa: F401
    import textwrap  # noqa: F401
    import traceback  # noqa: F401
    import urllib.parse  # noqa: F401

    import jinja2
    import jinja2.constants
    import jinja2.debug
    import jinja2.ext
    import jinja2.sandbox

    datetime.datetime.now().strftime("%c")  # which reads the time zone

    class RefusedError(jinja2.TemplateError):
        """`raise_exception` was called."""

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A call block, as in transformers: what is set inside is not seen outside.
            return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> Any:
            return caller()

    class Dict:
        """`dict` in templates, without the class's attributes."""

        def __call__(self, *args: Any, **values: Any) -> Any:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> Any:
            return dict.fromkeys(*args)

    class Namespace(jinja2.utils.Namespace):
        """`namespace` in templates, without names that begin with an underscore."""

        def __init__(*args: Any, **values: Any) -> None:  # a template may call an attribute `self`
            self, *rest = args
            attributes = dict(*rest, **values)
            for name in attributes:
                check_name(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"an attribute {name!r} that begins with an underscore")

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # jinja2's own filter escapes for HTML, which would change the prompt.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: object) -> None:
        raise RefusedError(str(message)[:1000])

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag], cache_size=0
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Namespace

    class Renderer:
        refused = RefusedError
        compile = staticmethod(environment.from_string)

    for source in ("{% for m in [{'a': 'b\\n'}] %}{{ m.a | trim | tojson }}{% endfor %}", "{{ 1 + '' }}", "{% for %}"):
        with contextlib.suppress(TypeError, jinja2.TemplateError):  # once, for what is imported on the way
            environment.from_string(source).render()
    return Renderer


if __name__ == "__main__":
    main()
