"""Chat templates of strangers: whatever they do, they render, or an error of ours comes within bounds."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
from hypothesis import strategies as st

from tests.fuzz.depth import both_depths, explore, refusal
from tests.llm.make_gguf import add_tokenizer, finish, vocabulary
from wgattn.errors import ArgumentError, FormatError, Unsupported, WgattnError
from wgattn.llm import template as rendering
from wgattn.llm.gguf import ModelFile
from wgattn.llm.template import Template
from wgattn.llm.template_worker import Rejected, Renderer, reject
from wgattn.llm.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ["a", {"b": [1, 2.5, None, True]}]}]

FOREVER = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "a power": "{{ messages | length ** (9 ** 9) }}{{ 9 ** (9 ** 9) }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a comparison of deep lists": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}"
    "{% endfor %}{{ ns.a == ns.b }}",
    "a sort of everything": "{% for i in range(99999) %}{% set x = range(99999) | sort(reverse=true) | list %}{% endfor %}",
}
LARGE = {
    "a long text": "{{ 'x' * 10000000000 }}",
    "a wide field": "{{ '%10000000000d' % 1 }}",
    "a wide format": "{{ '{:10000000000}'.format(1) }}",
    "padding": "{{ 'x' | center(10000000000) }}",
    "text that doubles": "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
    "a list that doubles": "{% set ns = namespace(t=[1]) %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "a deep list as text": "{% set ns = namespace(t=['x']) %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.t }}",
    "indentation": "{{ messages | tojson(indent=1000000000) }}",
}
ATTACKS = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ range(1000000) }}",
    "{{ undefined.attribute }}",
    "{{ 1 / 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages[0]['role'].encode().decode('rot13') }}",
]
BROKEN = ["{% for %}", "{{", "{% endif %}", "{{ " + "(" * 3000 + ")" * 3000 + " }}", "{% if a %}" * 200 + "{% endif %}" * 200, "{{ x | nothing }}", "{# never"]


@pytest.fixture
def short(monkeypatch) -> None:
    """Less patience than is given otherwise, but enough to start a process on a busy machine."""
    monkeypatch.setattr(rendering, "MAX_SECONDS", 2.0)
    monkeypatch.setattr(rendering, "MAX_MEMORY", 1 << 28)


def render(source: str, messages=MESSAGES, template: Template | None = None) -> str:
    """By a process that is there, or by a new one."""
    template = template or Template("", "m.gguf")
    template._source = source
    return template.render(messages=messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")


def outcome(source: str, template: Template | None = None) -> str:
    """The text or the message of our error, in brackets its kind."""
    try:
        return render(source, template=template)
    except WgattnError as error:
        return f"[{type(error).__name__}] {error}"


def test_no_template_runs_for_ever_or_takes_much_memory(short):
    """All are stopped: by the clock, or by the limit of memory where the system keeps one."""
    begin = time.monotonic()
    with ThreadPoolExecutor(5) as pool:
        sources = FOREVER | (LARGE if sys.platform.startswith("linux") else {})
        found = dict(zip(sources, pool.map(outcome, sources.values()), strict=True))
    assert time.monotonic() - begin < 15 * len(found)
    for name, text in found.items():
        stopped = r"\[FormatError\] m\.gguf has a chat template .* (takes more (than .* seconds|memory)|gives more than|ends the process)"
        assert re.match(stopped, text) or re.match(r"\[ArgumentError\] .*(memory|large|long|range)", text, re.IGNORECASE), f"{name}: {text[:200]}"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system keeps no limits of memory")
def test_the_limit_of_memory_holds(monkeypatch):
    """More than is allowed, and far less than the machine has."""
    source = "{% set x = messages[0].role * 75000000 %}{{ x | length }}"
    monkeypatch.setattr(rendering, "MAX_MEMORY", 1 << 28)
    with pytest.raises(FormatError, match="takes more memory than 268435456 bytes"):
        render(source)
    monkeypatch.setattr(rendering, "MAX_MEMORY", 1 << 30)
    assert render(source) == "300000000"


def test_no_template_gives_much_text():
    with pytest.raises(FormatError, match="gives more than 4194304 characters"):
        render("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}")
    assert len(render("{% for i in range(4000) %}{{ 'x' * 1000 }}{% endfor %}")) == 4_000_000


def test_templates_have_no_way_out():
    template = Template("", "m.gguf")
    for source in ATTACKS:
        text = outcome(source, template)
        assert text == "" or re.match(r"\[ArgumentError\] the chat template of m\.gguf cannot render", text), f"{source}: {text[:200]}"


def test_templates_that_do_not_parse():
    for source in BROKEN:
        with pytest.raises(FormatError, match=r"m\.gguf has a chat template \(tokenizer\.chat_template\) that (does not parse|ends the process)"):
            render(source)


def test_a_template_gets_only_what_it_is_given():
    """No environment, no files, no modules; what is undefined is empty."""
    assert render("{{ environ }}{{ os }}{{ sys }}{{ open }}{{ __builtins__ }}") == ""
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_the_process_does_not_get_the_environment(monkeypatch, tmp_path):
    """Where there may be secrets: a template that found a way out of the sandbox would read them there."""
    worker = tmp_path / "worker.py"
    worker.write_text("import json, os, sys\nfor line in sys.stdin:\n    print(json.dumps({'text': json.dumps(dict(os.environ))}), flush=True)\n")
    monkeypatch.setattr(rendering, "_WORKER", worker)
    monkeypatch.setenv("A_TOKEN", "secret")
    monkeypatch.setenv("TZ", "UTC")
    found = json.loads(Template("", "some file").render())
    assert "A_TOKEN" not in found
    assert set(found) - {"LC_CTYPE"} <= set(rendering._ENVIRONMENT)  # Python sets its own locale
    assert found["TZ"] == "UTC"


def test_one_process_renders_again_and_again(short, monkeypatch):
    starts = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: starts.append(popen(*a, **k)) or starts[-1])
    template = Template("{{ messages[0].content }}{% if messages[0].content == 'loop' %}" + FOREVER["nested loops"] + "{% endif %}", "m.gguf")
    for text in ("a", "b", "é🦊\n\r\u2028", "\ud800", "x" * 100_000):
        assert template.render(messages=[{"content": text}]) == text
    assert len(starts) == 1
    with pytest.raises(FormatError, match=r"more than 2 seconds|memory"):
        template.render(messages=[{"content": "loop"}])
    assert template.render(messages=[{"content": "c"}]) == "c"
    starts[-1].kill()
    starts[-1].wait()
    assert template.render(messages=[{"content": "d"}]) == "d"
    assert len(starts) == 3
    del template
    assert starts[-1].wait(10) is not None  # it ends with the object


def test_threads_that_render_take_turns():
    template, wrong = Template("{{ n }}", "m.gguf"), []

    def work(number: int) -> None:
        wrong.extend(n for n in range(40) if template.render(n=number * 1000 + n) != str(number * 1000 + n))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_interrupted_rendering_leaves_no_answer_behind(monkeypatch):
    template = Template("{{ n }}", "m.gguf")
    assert template.render(n=1) == "1"
    process = template._worker[0]

    class Interrupted:
        def readline(self) -> str:
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    monkeypatch.setattr(process, "stdout", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        template.render(n=2)
    assert template.render(n=3) == "3"


def test_messages_that_are_no_json():
    deep: list = []
    deep.append(deep)
    for wrong in ({1, 2}, b"bytes", object(), deep):
        with pytest.raises(ArgumentError, match="texts, numbers, lists and mappings"):
            render("{{ messages }}", wrong)


def test_a_python_that_cannot_start_another(monkeypatch):
    for executable in ("", "/no/such/python"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(Unsupported, match="none can be started"):
            render("x")


def test_the_process_knows_its_place():
    """What it is sent by mistake it answers, and it ends when nobody is there."""
    made = Renderer(100, 1 << 30)
    assert made.answer('{"source": "{{ n }}", "names": {"n": 3}}') == {"text": "3"}
    assert list(made.answer("no JSON")) == ["failed"]
    assert list(made.answer('{"source": "{{", "names": {}}')) == ["syntax"]
    assert made.answer('{"source": "{{ raise_exception(n) }}", "names": {"n": "no"}}') == {"rejected": "no"}
    assert list(made.answer('{"source": "{{ \'x\' * 101 }}", "names": {}}')) == ["bounds"]
    assert json.loads(made.answer('{"source": "{{ n | tojson(indent=1) }}", "names": {"n": ["<"]}}')["text"]) == ["<"]
    with pytest.raises(Rejected):
        reject("why")
    how = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-I", str(rendering._WORKER)], input='{"paths": [], "longest": 9, "memory": 1073741824}\n', **how)
    assert done.returncode == 0, done.stderr


PIECES = """{{ }} {% %} {# #} for_m_in_messages endfor if else endif m.role m['content'] messages loop.index namespace(a=1) set_x= set_ns.a= macro_f(a)
endmacro f(1) raise_exception('x') strftime_now('%Y') |tojson |trim |join |replace('a','b') 'x' 1 * + ~ % ** [ ] ( ) range(9) recursive break continue
.__class__ |default('') |sort |map(attribute='role') |list is_defined not - <s> bos_token filter_upper endfilter call(x)_f() endcall block_b endblock"""
PIECE = st.sampled_from([piece.replace("_", " ") if piece[0].isalpha() else piece for piece in PIECES.split()])


@both_depths
def test_any_template_renders_or_raises_ours(depth, monkeypatch):
    monkeypatch.setattr(rendering, "MAX_SECONDS", 5.0)
    template = Template("", "m.gguf")

    def check(pieces: list[str]) -> None:
        template._source = " ".join(pieces)
        message = refusal(lambda: template.render(messages=MESSAGES, bos_token="<s>"))
        assert message is None or "template" in message

    explore(check, st.lists(st.one_of(PIECE, st.text(max_size=4)), max_size=30), depth=depth, quick=150, thorough=20_000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_starts_a_process_of_its_own():
    template = Template("{{ n }}", "m.gguf")
    assert template.render(n=1) == "1"
    child = os.fork()
    if child == 0:
        os._exit(0 if template.render(n=2) == "2" and template._worker[1] == os.getpid() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(n=3) == "3"


def test_what_a_file_says_is_the_place(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "named.gguf", "llama")
    add_tokenizer(writer, *vocabulary(262), template="{% for %}")
    finish(writer)
    with pytest.raises(FormatError, match=r"named\.gguf has a chat template \(tokenizer\.chat_template\) that does not parse"):
        Tokenizer.from_gguf(ModelFile(tmp_path / "named.gguf")).render_chat([])
