"""`distca watch`: the page of a run that goes on, to this machine alone, until Ctrl-C."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from distca.cli.watch import PageServer, listen

RECORD = {"loss": 2.5, "seconds": 0.5, "tokens_per_second": 100.0}


def log_step(folder: Path, step: int) -> None:
    with open(folder / "steps.jsonl", "a") as file:
        file.write(json.dumps({"step": step, **RECORD}) + "\n")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    (tmp_path / "log").mkdir()
    with listen(tmp_path / "log", "127.0.0.1", 0) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: PageServer, path: str, host: str = "localhost:1", method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content


def figures(server: PageServer) -> dict[str, Any]:
    status, content = ask(server, "/figures")
    assert status == 200
    return json.loads(content)


def test_new_steps_arrive_and_new_contents_are_named(server: PageServer) -> None:
    assert figures(server)["status"] == "No step is logged yet." and figures(server)["run"] is None
    log_step(server.run, 1)
    first = figures(server)
    assert re.fullmatch(r"Live: step 1 of many ended at \d\d:\d\d:\d\d\.", first["status"])
    log_step(server.run, 2)
    with open(server.run / "steps.jsonl", "a") as file:
        file.write('{"step": 3, "lo')                            # being written
    second = figures(server)
    assert second["run"]["runs"][0]["step"] == [1, 2] and "in 2 steps" in second["summary"]
    assert second["contents"] == first["contents"]
    (server.run / "step_2.json").write_text("[]")
    assert figures(server)["contents"] != first["contents"]
    (server.run / "summary.json").write_text(json.dumps({
        "ended": "Finished", "last_step": 2, "steps": 2, "tokens_per_second": 1, "work_before": 1, "work_after": 1,
        "exposed_share": 0, "memory_bytes": 1, "final_loss": 1}))
    assert figures(server)["status"] == "The run has ended." and "Finished: in 2 steps" in figures(server)["summary"]


def test_the_page_asks_nobody_but_its_server(server: PageServer) -> None:
    log_step(server.run, 1)
    status, page = ask(server, "/")
    assert status == 200 and "default-src 'none'" in page and "connect-src 'self'" in page
    contents = json.dumps(figures(server)["contents"])[1:-1]
    assert f'data-contents="{contents}"' in page


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "0.0.0.0:1"])
def test_another_host_is_refused(server: PageServer, host: str) -> None:
    for path in ("/", "/figures"):
        assert ask(server, path, host) == (403, "Ask for localhost.")


def test_there_is_nothing_else(server: PageServer) -> None:
    for path in ("/steps.jsonl", "/../log/steps.jsonl", "/figures/.."):
        assert ask(server, path)[0] == 404
    assert ask(server, "/", method="POST")[0] == 501
    assert ask(server, "/", "[::1]:80")[0] == ask(server, "/", "127.0.0.1")[0] == 200


def test_a_broken_file_is_said_and_asked_for_again(server: PageServer) -> None:
    (server.run / "summary.json").write_text("{")
    status, said = ask(server, "/figures")
    assert status == 503 and "summary.json" in said
    (server.run / "summary.json").unlink()
    assert figures(server)["status"]


@pytest.mark.parametrize(("arguments", "fragments"), [
    (["nowhere"], ["nowhere", "no such folder"]),
    (["log", "--address", "0.0.0.0"], ["'0.0.0.0'", "127.0.0.1", "ssh -L"]),
    (["log", "--address", "192.168.0.1"], ["'192.168.0.1'", "127.0.0.1"]),
    (["log", "--address", "::"], ["'::'", "::1"]),
    (["log", "--address", "example.com"], ["'example.com'"]),
    (["log", "--port", "70000"], ["port", "70000"]),
    (["log", "--port", "x"], ["port"]),
], ids=" ".join)
def test_mistakes_get_one_line(run: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: list[str],
                               fragments: list[str]) -> None:
    (tmp_path / "log").mkdir()
    code, out, err = run("watch", *arguments)
    assert (code, out) == (2, "") and err.startswith("distca: error: ") and err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err


def test_a_port_in_use_is_named(run: Callable[..., tuple[int, str, str]], server: PageServer) -> None:
    code, out, err = run("watch", server.run, "--port", server.server_port)
    assert (code, out) == (2, "") and str(server.server_port) in err and "--port" in err


def test_ctrl_c_ends_it_also_while_a_page_is_open(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distca", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        assert process.stdout is not None and process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/ to this machine alone", process.stdout.readline())
        assert found
        open_ = HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
        open_.connect()                                          # asks for nothing and stays
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0 and process.stderr.read() == ""
        open_.close()
