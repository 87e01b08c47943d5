"""Renders chat templates, as a process of its own that `template.py` starts: a template is a program from a file of strangers.

Requests come as lines of JSON on stdin, answers go out as lines of JSON on stdout. Not imported by the package: the first line tells where Jinja is.
"""

import json
import sys
from datetime import datetime


class Rejected(Exception):
    """The template itself refuses the messages."""


def reject(message):
    raise Rejected(message)


def to_json(value, indent=None):
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own escapes HTML


def limit_memory(nbytes):
    """Where the system can, make allocations beyond that fail."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass


def environment():
    """With the settings, filter and globals that templates written for Hugging Face rely on."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = reject
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class Renderer:
    """Answers requests; keeps the last template compiled."""

    def __init__(self, longest, memory):
        self._made, self._longest, self._memory = environment(), longest, memory
        self._source, self._template = None, None
        self.answer('{"source": "{% for x in [1] %}{{ x | tojson }}{% endfor %}", "names": {}}')  # what rendering imports is imported now

    def answer(self, line):
        """{"text": ...}, or what went wrong as {"syntax" | "rejected" | "failed" | "bounds": why}."""
        try:
            request = json.loads(line)
            if request["source"] != self._source:
                try:
                    self._template = self._made.from_string(request["source"])
                except MemoryError:
                    raise
                except Exception as error:  # also what Python's own compiler thinks of deep nesting
                    return {"syntax": str(error) or type(error).__name__}
                self._source = request["source"]
            return self._render(request["names"])
        except Rejected as error:
            return {"rejected": str(error)}
        except MemoryError:
            return {"bounds": f"takes more memory than {self._memory} bytes"}
        except Exception as error:  # a template may fail in any way on messages that it was not written for
            return {"failed": str(error) or type(error).__name__}

    def _render(self, names):
        pieces, size = [], 0
        for piece in self._template.generate(**names):
            size += len(piece)
            if size > self._longest:
                return {"bounds": f"gives more than {self._longest} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}


def main():
    setting = json.loads(sys.stdin.readline())
    sys.path[:0] = setting["paths"]
    renderer = Renderer(setting["longest"], setting["memory"])
    limit_memory(setting["memory"])
    for line in sys.stdin:
        text = json.dumps(renderer.answer(line))
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
