"""Which text does every user already have? Python source of the standard library and of the
installed torch package.

The embedded model is trained on :func:`training_files`. :data:`HELD_OUT` is a fixed list of
standard-library modules that training never reads; it is the default corpus of every command. No
text is shipped. The list has the sha256 that each module had when the model was trained, so that
:func:`held_out_documents` can say which modules are missing or have changed in this Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT: dict[str, str] = {
    "argparse.py": "dc1eba8adfdf615986421f981337458ba1072d3e718a0f76e3224940fd74118b",
    "calendar.py": "b3b140864fd122a575ffcc9342b824fbe4f8a38fdf3f4fcd964f26e52725358f",
    "codecs.py": "f16a81d14e7f73931ecf9f9f2e17c10bc0ca29bbe38b0243f6919b70882fcfea",
    "configparser.py": "4a70cecccb55031a413b79e6ced2e63ca031f770cd25a4882980ecdeab67f6ff",
    "difflib.py": "0c6afc23568d55b3e9ac914f9c5361e3033e778aa5b58d3cc82835fc5c638679",
    "enum.py": "84fc683aa71da233cf0f6a1bd59ffedc2bc7adb3a40f9339052141176071b6d6",
    "fractions.py": "b11e850e354808b882d13a70a911c29accd1dbdd41757566704e3b7206c74edb",
    "gettext.py": "a5c249a522b6b8e3aa6f1b12a8bcc09508b99ad612b58d2fc973db27ea3b7cc3",
    "heapq.py": "6d43277e5c76fc0f073cd388fcff852d14d068f6bb6d4886c340f8b75a1229a9",
    "imaplib.py": "dc3be105fb6b3e28074c4dbe0d4177c8445a803b5a935f3c4bbfe77701259c39",
    "inspect.py": "d55ac82f84e5c93953e9f5852ec255957e6c12f47d5cc0ea456447319da0f5af",
    "locale.py": "ac828df41b2fac93ba3e66a2735216c98c0e1853b8dfb9b859e301fe64153feb",
    "mailbox.py": "e695a76d936f009d926e50eae09e34e1256ceee86ffb5b5825748e98f9080036",
    "optparse.py": "07d224301cba312fa0697bff9cd5a4bb4f778a90629632091b3f4ae874d89af5",
    "pdb.py": "2edee4e67353513fa4aa1c9aec17dfb28136254e6648b6f42dfc3430fd0e7868",
    "pickle.py": "f29792b7bad19b9b7a6096aae01e9a6a0a3ec28029576af74efc530ee331c412",
    "platform.py": "4a3cc68ba7354f8d5cc28c55315a7d77b77dcdbbaa3a092572a636b5fb5b6938",
    "random.py": "b931a2d452db89ab9e1f79d59b66ce194dbd6748049cfe44699726da52b9c956",
    "shutil.py": "d0dbfcd96ba06684aaf5d55e941aaaf36bb3a22cf537ea9d46317b363bcc5792",
    "smtplib.py": "b154e27998d0ef0b32fcc665299cdb30883ffe039ede3c4faac3a9db6618d35d",
    "ssl.py": "e532bbe0ff12313b341a81adc389acff5b9f7dda40588929a95ee23c02bfbf45",
    "statistics.py": "889a066f1b8063e73387ceb84018efc507a89b365b56c6afb9cc15b2ed25c2d9",
    "subprocess.py": "2ff641d58f8696496e8718538cd96cd7afcd503ae271fb23da22422b3aee9fc7",
    "tarfile.py": "d6957647c11b6592e58e37d4e9f02f6cf9ee695cb0653b1072b542b8afac700d",
    "textwrap.py": "62867e40cdea6669b361f72af4d7daf0359f207c92cbeddfc7c7506397c1f31c",
    "threading.py": "2c4c1db159e1178896eca324082ae98d627c8d7017d0c7135b832f4fb3117210",
    "turtle.py": "787af385d6d4417aac8b686e8d5f49ce4afd7d1d09bde685bb378ed6ecc4fb7d",
    "typing.py": "115d96e966bf35cf97126f98dd1fa854a00dd832733fc01ede58cfd4fa490660",
    "xml/dom/minidom.py": "af4ee09b06efc54e7fe58032d8338c4bc8578094946d03a200740deab25d97cb",
    "xml/etree/ElementTree.py": "ff904b02de3a86888001f47f1518204d04d4e790d4ed85352d8544347ae7e940",
}
"""Module path inside the standard library -> sha256 of its bytes when the embedded model was
trained (CPython 3.11)."""
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
"""Folders of the standard library that are not trained on: installed packages and tests."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out documents found on this machine, and what differs from the list.

    ``texts`` and ``names`` run in parallel; ``missing`` are listed modules that this Python does
    not have, ``changed`` those whose bytes differ from the ones listed (they are used all the
    same).
    """

    names: tuple[str, ...]
    texts: tuple[str, ...]
    missing: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def note(self) -> str:
        """One line that says what differs from the list, empty when nothing does."""
        differing = {"missing": self.missing, "changed": self.changed}
        parts = [f"{len(v)} {k} ({', '.join(v)})" for k, v in differing.items() if v]
        return f"held-out modules: {'; '.join(parts)}" if parts else ""


def stdlib() -> Path:
    """Directory of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_documents() -> HeldOut:
    """Read the held-out modules of :data:`HELD_OUT` from this Python's standard library.

    >>> docs = held_out_documents()
    >>> len(docs.texts) == len(docs.names) > 10
    True
    """
    names, texts, missing, changed = [], [], [], []
    for name, digest in HELD_OUT.items():
        path = stdlib() / name
        if not path.is_file():
            missing.append(name)
            continue
        raw = path.read_bytes()
        if hashlib.sha256(raw).hexdigest() != digest:
            changed.append(name)
        names.append(name)
        texts.append(raw.decode("utf-8", errors="replace"))
    return HeldOut(tuple(names), tuple(texts), tuple(missing), tuple(changed))


def training_files() -> list[Path]:
    """Python sources of the standard library (tests, installed packages and held-out modules left
    out) and of torch, in a fixed order."""
    lib = stdlib()
    sources = sorted(lib.rglob("*.py"))
    sources = [p for p in sources if not SKIPPED.intersection(p.relative_to(lib).parts)]
    sources = [p for p in sources if p.relative_to(lib).as_posix() not in HELD_OUT]
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    return sources + sorted(root.rglob("*.py"))


def training_texts() -> list[str]:
    """The training documents as text (undecodable bytes replaced), in the order of
    :func:`training_files`."""
    return [p.read_text(encoding="utf-8", errors="replace") for p in training_files()]
