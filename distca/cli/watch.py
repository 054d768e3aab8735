"""`distca watch`: the report page of a run that goes on, served to this machine alone.

The page asks for newer figures every two seconds, and each request reads the run's log folder: the server holds no
state, starts no process and needs nothing from the run but its files. It listens on a loopback address and answers only
requests that name one as their host, so that no web page from elsewhere can have the browser read it.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from distca.cli.options import number
from distca.cli.report import page_of_runs
from distca.report.page import payload_of, render_page, sections_of, summary
from distca.report.runs import RunFiles, read_folder
from distca.validation import UserError, check_whole

DEFAULT_PORT = 8321


def watch_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The log.folder of a run.")],
    port: Annotated[int, number("Port of the page; 0 takes a free one.")] = DEFAULT_PORT,
    address: Annotated[str, typer.Option(help="Loopback address of the page; others are refused.")] = "127.0.0.1",
) -> None:
    """Serve a run's page to this machine while the run goes on, until Ctrl-C."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; give the log.folder of a run, which exists once the run has started")
    with listen(run, address, check_whole("port", port, least=0, most=65_535)) as server:
        host = f"[{address}]" if ":" in address else address
        try:
            print(f"{run} is shown at http://{host}:{server.server_port}/ to this machine alone. Ctrl-C ends.",
                  flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print()


class PageServer(ThreadingHTTPServer):
    """Serves one run's page; its threads end with the process."""

    def __init__(self, run: Path, address: str, port: int) -> None:
        self.run = run
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), PageRequest)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):             # else the browser is gone, or Ctrl-C closed the socket
            super().handle_error(request, client_address)


def listen(run: Path, address: str, port: int) -> PageServer:
    if not _is_loopback(address):
        raise UserError(f"address is {address!r}, which other machines may reach; give 127.0.0.1 or ::1, and look from "
                        f"elsewhere through ssh -L {port or DEFAULT_PORT}:localhost:{port or DEFAULT_PORT} HOST")
    try:
        return PageServer(run, address, port)
    except OSError as error:
        raise UserError(f"port {port} of {address} cannot be served ({error.strerror}); give another --port, or 0 for "
                        "a free one") from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class PageRequest(BaseHTTPRequestHandler):
    """Answers for the page and for its newest figures, and refuses everything else."""

    server: PageServer
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        if not _is_loopback(host.rpartition(":")[0].strip("[]") if ":" in host else host):
            return self._answer(HTTPStatus.FORBIDDEN, "Ask for localhost.")
        made = {"/": live_page, "/figures": live_figures}.get(self.path)
        if made is None:
            return self._answer(HTTPStatus.NOT_FOUND, "There are / and /figures.")
        try:
            kind = "text/html" if made is live_page else "application/json"
            return self._answer(HTTPStatus.OK, made(self.server.run), kind)
        except (UserError, OSError) as error:                    # a file that is being written; the page asks again
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(content))),
                            ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal shows the address."""


def live_page(run: Path) -> str:
    files = read_folder(run, live=True)
    data = replace(page_of_runs([(run, files)]), title=f"Run {run}")
    return render_page(data, live=_contents(files))


def live_figures(run: Path) -> str:
    """Return the summary, the curves and how far the run is, as JSON; traces are left to the page."""
    files = read_folder(run, live=True)
    data = page_of_runs([(run, replace(files, traces={}, ranks={}))])
    return json.dumps({"contents": _contents(files), "summary": summary(data), "status": _status(run, files),
                       "run": payload_of(sections_of(data)).get("run")}, allow_nan=False)


def _contents(files: RunFiles) -> str:
    """Name what the page has sections for: if it changes, the page is loaded again."""
    return f"{sorted(files.traces)} {sorted(files.ranks)} {files.figures is not None} {len(files.settings)}"


def _status(run: Path, files: RunFiles) -> str:
    if files.figures is None:
        return "No step is logged yet."
    if files.summary:
        return "The run has ended."
    at = time.strftime("%H:%M:%S", time.localtime((run / "steps.jsonl").stat().st_mtime))
    return f"Live: step {files.figures.step[-1]:,} of {files.settings.get('run.steps', 'many')} ended at {at}."
