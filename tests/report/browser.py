"""A headless browser, spoken to over a pipe by the DevTools protocol: no driver, no package, nothing downloaded."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio")

# the browser reads descriptor 3 and writes 4
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """The browser that there is: $BROWSER_FOR_TESTS, or one of the usual names."""
    given = os.environ.get("BROWSER_FOR_TESTS")
    return given or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One process with one tab. `problems` collects what the page complained about."""

    def __init__(self, program: str, profile: Path, timeout: float = 60) -> None:
        self.timeout, self.problems, self._buffer, self._number = timeout, [], b"", 0
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        start = [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *command]
        self._process = subprocess.Popen(
            start, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._in, False)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> Any:
        """One command and its answer."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message; complaints are noted on the way."""
        until = time.monotonic() + self.timeout
        while b"\0" not in self._buffer:
            assert time.monotonic() < until, "the browser does not answer"
            assert self._process.poll() is None, "the browser ended"
            try:
                self._buffer += os.read(self._in, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        method, params = message.get("method"), message.get("params", {})
        bad = method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
        bad = bad or (method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"))
        if bad or method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params))
        return message

    # ------------------------------------------------------------ what a reader does

    def open(self, page: Path, width: int = 1000, dark: bool = False, media: str = "") -> None:
        """Show a page in a window so wide, and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1,
                  mobile=width < 500)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState == 'complete' && location.protocol == 'file:'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + self.timeout
        while not self.run(condition):
            assert time.monotonic() < until, f"never true: {condition}"
            time.sleep(0.02)

    def click(self, element: str) -> None:
        """A real click in the middle of what a script expression names."""
        place = "(e => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
        x, y = self.run(f"{place} return [r.x + r.width / 2, r.y + r.height / 2]; }})({element})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def download(self, element: str, folder: Path) -> Path:
        """Click on what downloads and return the file, whole."""
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.iterdir())
        session, self._session = self._session, None
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self._session = session
        self.click(element)
        until = time.monotonic() + self.timeout
        while True:
            done = [
                f for f in set(folder.iterdir()) - before if f.suffix in (".csv", ".png", ".svg") and f.stat().st_size
            ]
            if done:
                return done[0]
            assert time.monotonic() < until, f"nothing was downloaded by {element}"
            self.run("0")
            time.sleep(0.02)

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))
        return path
