"""Chat templates are code from strangers: whatever they do, they end soon, in little memory, with an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from w4conv.errors import InputError
from w4conv.runtime import template_process, template_renderer
from w4conv.runtime.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]
GROWS = "{% set n = namespace(v=START) %}{% for i in range(99) %}{% set n.v = STEP %}{% endfor %}"
GROWS += "{{ n.v | string | length }}"
TWICE = "{% macro fI() %}{{ fJ() ~ fJ() }}{% endmacro %}"

# What ends with an error.
REFUSED = {
    "doubling a text": GROWS.replace("START", "'ab'").replace("STEP", "n.v ~ n.v"),
    "doubling by format": GROWS.replace("START", "'ab'").replace("STEP", "'%s%s' | format(n.v, n.v)"),
    "doubling by replace": GROWS.replace("START", "'ab'").replace("STEP", "n.v | replace('a', 'aaaaaaaa')"),
    "doubling by join": GROWS.replace("START", "'ab'").replace("STEP", "[n.v, n.v] | join"),
    "doubling a list": GROWS.replace("START", "[1]").replace("STEP", "n.v + n.v"),
    "nesting a list": GROWS.replace("START", "[1]").replace("STEP", "[n.v, n.v]").replace("string", "tojson"),
    "squaring": GROWS.replace("START", "3").replace("STEP", "n.v * n.v"),
    "powers": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "powers in a loop": GROWS.replace("START", "3").replace("STEP", "n.v ** 3"),
    "digits": "{{ (10 ** 5000) | string }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "zfill": "{{ '1'.zfill(3000000000) }}",
    "width of format": "{{ '%999999999d' | format(1) }}",
    "width of str.format": "{{ '{:999999999d}'.format(1) }}",
    "expandtabs": "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "translate": "{{ 'aaaa'.translate({97: 'b' * 100000000}) }}",
    "join": "{{ range(99999) | join('x' * 100000) }}",
    "repeating": "{{ 1000000000 * 'x' }}",
    "repeating a list": "{{ [[0] * 1000] * 1000000000 }}",
    "sum of lists": "{% set a = [1] * 100000 %}{{ ([a] * 1000) | sum(start=[]) | length }}",
    "slices": "{{ range(99999) | slice(99999999) | list }}",
    "a long range": "{{ range(10 ** 12) | list }}",
    "output": "{% for i in range(99999) %}{{ 'abcdefgh' * 1000 }}{% endfor %}",
    "output, bit by bit": "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' }}{% endfor %}{% endfor %}",
    "no output": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "cycle": "{% for i in range(99999) %}{{ loop.cycle('a' * 1000000, 'b') }}{% endfor %}",
    "recursive loop": "{% for a in [[]] recursive %}{{ loop([[]]) }}{% endfor %}",
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros that call twice": "{% macro f0() %}x{% endmacro %}"
    + "".join(TWICE.replace("I", str(i)).replace("J", str(i - 1)) for i in range(1, 40))
    + "{{ f39() }}",
    "21 nested loops": "".join(f"{{% for a{i} in [1] %}}" for i in range(21)) + "{% endfor %}" * 21,
    "nested ifs": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "brackets": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
    "signs": "{{ " + "-" * 100_000 + "1 }}",
    "attributes": "{{ a" + ".b" * 100_000 + " }}",
    "filters": "{{ 1" + "|string" * 50_000 + " }}",
    "terms": "{{ 1" + "+1" * 200_000 + " }}",
    "words of lorem ipsum": "{{ lipsum(100000) }}",
    "a long complaint": "{{ raise_exception('x' * 3000000) }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "by str.format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "by map": "{{ [1] | map(attribute='__class__') | list | first | attr('mro') }}",
    "include": "{% include '/etc/passwd' %}",
    "import of itself": "{% import '' as me %}",
    "changing what it got": "{{ messages.append(1) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_ends_with_an_error(name: str) -> None:
    with ChatTemplate(REFUSED[name]) as template, pytest.raises(InputError, match="the chat template") as error:
        template.render(MESSAGES, special_tokens={})
    assert len(str(error.value)) < 1200


def test_memory() -> None:
    """Of the largest of all those processes, measured by the system; and of the one that asks."""
    code = (
        "import json, resource, sys\n"
        "from w4conv.errors import InputError\n"
        "from w4conv.runtime.chat import ChatTemplate\n"
        "def peak(who): return resource.getrusage(who).ru_maxrss << 10\n"
        "before = peak(resource.RUSAGE_SELF)\n"
        "for source in json.load(sys.stdin):\n"
        "    try:\n"
        "        with ChatTemplate(source) as t:\n"
        "            t.render([{'role': 'user', 'content': 'x' * 100000}], special_tokens={})\n"
        "    except InputError: pass\n"
        "print(peak(resource.RUSAGE_CHILDREN), peak(resource.RUSAGE_SELF) - before)\n"
    )
    full = "{% for i in range(2047) %}{{ 'a' * 1000 ~ '\\U0001f600' }}{% endfor %}"  # as long as a prompt may be
    slow = ("squaring", "powers", "bit by bit", "no output", "macros that", "terms", "lorem", "nesting a list")
    sources = [s for n, s in REFUSED.items() if not any(word in n for word in slow)] + [full]
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(sources), capture_output=True, text=True, check=True
    )
    theirs, ours = map(int, done.stdout.split())
    assert theirs < 64 << 20
    assert ours < 32 << 20


def test_after_a_bound_was_reached_the_template_still_renders() -> None:
    source = "{% if messages[0].content == 'bad' %}{{ 'a' | center(3000000000) }}{% for i in range(99999) %}"
    source += "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
    template = ChatTemplate(source)
    for content, fails in (("good", False), ("bad", True), ("good", False)):
        messages = [{"role": "user", "content": content}]
        if fails:
            with pytest.raises(InputError):
                template.render(messages, special_tokens={})
        else:
            assert template.render(messages, special_tokens={}) == "ok"
    with pytest.raises(InputError, match="exceeds its limits"):
        ChatTemplate(REFUSED["no output"]).render(MESSAGES, special_tokens={})
    template.close()
    template.close()
    assert template.render(MESSAGES, special_tokens={}) == "ok", "a process is started again"


def test_the_process_may_do_nothing_else() -> None:
    """A template that got out of the sandbox: the limits that the process gave itself, as the system shows them."""
    template = ChatTemplate("x")
    template.check()
    pid = template._renderer._process._process.pid  # type: ignore[union-attr]  # started above
    limits = {line[:25].strip(): line.split()[-3:-1] for line in Path(f"/proc/{pid}/limits").read_text().splitlines()}
    for name in ("Max open files", "Max file size", "Max processes", "Max core file size"):
        assert limits[name][0] == "0", name
    assert int(limits["Max data size"][1]) < 64 << 20
    names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {n.split(b"=")[0].decode() for n in names if n} <= set(template_renderer._ENVIRONMENT)
    template.close()
    assert not Path(f"/proc/{pid}").exists()


def test_threads_share_a_template() -> None:
    template = ChatTemplate("{% for i in range(50) %}{{ messages[0].content }}{% endfor %}")
    wrong = []

    def use(word: str) -> None:
        for _ in range(20):
            got = template.render([{"role": "user", "content": word}], special_tokens={})
            if got != word * 50:
                wrong.append((word, got))

    threads = [threading.Thread(target=use, args=(w,)) for w in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def script(tmp_path: Path, body: str) -> list[str]:
    """A user's script, which has no `if __name__ == "__main__"`."""
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys, time, signal\n"
        "from w4conv.runtime.chat import ChatTemplate\n"
        "M = [{'role': 'user', 'content': 'Hi'}]\n"
        "t = ChatTemplate('{{ messages[0].content }}!')\n" + body
    )
    return [sys.executable, str(path)]


def test_a_script_that_forks(tmp_path: Path) -> None:
    body = (
        "assert t.render(M, special_tokens={}) == 'Hi!'\n"
        "pid = os.fork()\n"
        "text = t.render(M, special_tokens={})\n"
        "assert text == 'Hi!'\n"
        "if not pid: sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "assert t.render(M, special_tokens={}) == 'Hi!'\n"
        "print('fine')\n"
    )
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_standard_streams_that_are_closed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    body = f"open({str(out)!r}, 'w').write(t.render(M, special_tokens={{}}))\n"
    command = " ".join(script(tmp_path, body))
    subprocess.run(f"exec {command} <&- >&- 2>&-", shell=True, check=True, timeout=60)
    assert out.read_text() == "Hi!"


def test_interrupting_a_rendering(tmp_path: Path) -> None:
    body = (
        "loops = '{% for i in range(99999) %}{% for j in range(999) %}{% endfor %}{% endfor %}'\n"
        "t = ChatTemplate('{% if not x %}' + loops + '{% endif %}ok')\n"
        "t.check()\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "try: t.render(M, special_tokens={})\n"
        "except KeyboardInterrupt: print('interrupted')\n"
        "print(t.render(M, special_tokens={}, x=True))\n"
    )
    done = subprocess.run(script(tmp_path, body), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("interrupted\nok\n", "")


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    body = (
        "t.check()\n"
        "print(t._renderer._process._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )  # fmt: skip
    with subprocess.Popen(script(tmp_path, body), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    for _ in range(200):
        try:
            ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            ended = True
        if ended:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it is still there after 10 s")


def test_the_bounds_are_those_of_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs/security.md").read_text()
    assert f"{template_process.MEMORY_NBYTES >> 20} MiB" in text
    assert f"{template_process.CPU_SECONDS:g} s of processor time" in text
    assert f"{template_renderer.MAX_SECONDS:g} s by the clock" in text
    assert f"{template_renderer.MAX_PROMPT_CHARS:,} characters" in text
