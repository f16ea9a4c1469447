"""Whether a file can be written is asked by several processes at once, and changes nothing."""

import threading
from pathlib import Path

from jscaler.report.written import check_file


def test_a_check_of_a_file_neither_makes_nor_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    failed: list[BaseException] = []

    def check() -> None:
        try:
            for _ in range(200):
                check_file("log", path)
        except BaseException as error:  # an exception of a thread is lost otherwise
            failed.append(error)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not any(path.parent.iterdir())

    path.write_text("{}\n")
    check_file("log", path)
    assert path.read_text() == "{}\n"
