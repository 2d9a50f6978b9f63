from __future__ import annotations

import threading

from attnbench.core import native, waiting
from attnbench.core.carried import carried


def test_what_was_set_holds_in_another_thread_and_later(monkeypatch):
    monkeypatch.delenv(native.SWITCH, raising=False)
    seen = []

    def look(word: str) -> None:
        seen.append((word, waiting.forbidden(), native.is_off()))

    with waiting.forbid(), native.off():
        later = carried(look)
        later("here")
    later("after")
    thread = threading.Thread(target=later, args=("beside",))
    thread.start()
    thread.join()
    look("bare")
    assert seen == [("here", True, True), ("after", True, True), ("beside", True, True), ("bare", False, False)]
