# SPDX-License-Identifier: Apache-2.0
"""Work that a signal's handler must not part.

Python runs handlers between two of its instructions, in the main thread, and a handler may raise (KeyboardInterrupt).
What has to happen as a whole, such as a step and the copying back of what it made, is put in `with whole():`. Handlers
run when it is over.
"""

import signal
import threading


class whole:
    def __enter__(self):
        self._saved, self._came = [], []
        if threading.current_thread() is not threading.main_thread():
            return self  # no handler ever runs here
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._saved.append((number, handler))
                    signal.signal(number, self._later)
        except BaseException:  # one that came before its handler was put off
            self._restore()
            raise
        return self

    def _later(self, number, frame):
        self._came.append((number, frame))

    def _restore(self):
        for number, handler in self._saved:
            signal.signal(number, handler)

    def __exit__(self, *exc):
        self._restore()
        for number, frame in self._came:
            dict(self._saved)[number](number, frame)
        return False
