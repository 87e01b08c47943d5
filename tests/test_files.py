"""Files that are replaced: the old or the new contents, and nothing beside them, wherever an interruption comes."""

import os
import stat

import pytest

from wgattn.files import replace_file


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("step", ["fdopen", "chmod", "replace"])
def test_an_interruption_leaves_the_old_or_the_new_file(tmp_path, monkeypatch, step, done):
    path, original = tmp_path / "x.json", getattr(os, step)
    replace_file(path, "old", 0o644)

    def interrupted(*args, **kwargs):
        if done:
            left = original(*args, **kwargs)
            if step == "fdopen":
                left.close()
        elif step == "fdopen":
            os.close(args[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            replace_file(path, "new", 0o644)
    assert path.read_text() == ("new" if done and step == "replace" else "old")
    assert os.listdir(tmp_path) == ["x.json"]
    replace_file(path, "newer", 0o644)
    assert path.read_text() == "newer"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_file_is_its_owners_unless_it_is_said_otherwise(tmp_path):
    for mode in (0o600, 0o644):
        replace_file(tmp_path / "x", "text", *([] if mode == 0o600 else [mode]))
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode
