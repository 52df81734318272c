"""A headless Chromium that tests control over the DevTools protocol, without more packages."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium():
    """Returns the browser's path; skips the test if there is none."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on the PATH (Debian: apt install chromium)")


class Page:
    """A browser tab. ``events`` collects the events that its pages report."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._last, self._buffer, self._session = 0, b"", None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(1440, 900)

    def call(self, method, **params):
        """Runs a DevTools command and returns its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._receive()).get("id") != self._last:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self):
        while b"\0" not in self._buffer:
            part = os.read(self._from.fileno(), 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path, fragment=""):
        """Loads a file and waits until the page is drawn."""
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        while not any(self._is_loaded(event) for event in self.events):
            self.events.append(self._receive())

    def _is_loaded(self, event):
        is_ours = event.get("method") == "Page.lifecycleEvent" or "loadEventFired" in str(event)
        return is_ours and self.evaluate("document.readyState === 'complete' && location.protocol")

    def resize(self, width, height):
        """Sets the size of the viewport in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, expression):
        """Returns the value of a JavaScript expression or promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def after(self, event, on, action):
        """Runs ``action`` and waits until the object ``on`` fires ``event``."""
        self.evaluate(
            f"new Promise((done) => {{ ({on}).addEventListener('{event}', () => done(), "
            f"{{ once: true }}); {action}; }})"
        )

    def press(self, key):
        """Presses a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def text(self, selector):
        """Returns the text of the first matching element, or None."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? null")

    def count(self, selector):
        """Returns the number of matching elements."""
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def requests(self):
        """Returns the addresses that were requested since the page was opened."""
        sent = (e for e in self.events if e.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self):
        """Returns uncaught errors and the browser's log: refused scripts, failed loads."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event["params"] for event in self.events if event.get("method") in kinds]


def _pipe():
    """Returns a pipe whose descriptors differ from the ones that bash redirects."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved


@contextlib.contextmanager
def headless(profile):
    """Yields a `Page` of a browser that keeps its files in ``profile``."""
    browser = find_chromium()
    commands, to_browser = _pipe()
    from_browser, answers = _pipe()
    # The protocol uses descriptors 3 and 4, to which bash redirects the pipes.
    script = f'exec "$@" 3<&{commands} 4>&{answers} {commands}<&- {answers}>&-'
    process = subprocess.Popen(
        [
            *("bash", "-c", script, "bash", browser, "--headless", "--no-sandbox"),
            *("--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
            *("--disable-dev-shm-usage", f"--user-data-dir={profile}"),
        ],
        pass_fds=(commands, answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    with os.fdopen(to_browser, "wb") as to, os.fdopen(from_browser, "rb", buffering=0) as source:
        try:
            page = Page(to, source)
            yield page
            page._session = None
            page.call("Browser.close")
            process.wait(20)
        finally:
            process.kill()
            process.wait()
