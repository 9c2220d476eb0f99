# SPDX-License-Identifier: Apache-2.0
"""Work that a signal's handler must not part.

Python runs handlers between two of its instructions, in the main thread, and a handler may raise (KeyboardInterrupt).
What has to happen as a whole, such as a step and the copying back of what it made, is put in `with whole():`, or is a
function with `@whole()` before it. Handlers run when it is over. One whole may be inside another.
"""

import contextlib
import signal
import threading


class whole(contextlib.ContextDecorator):
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

    def _recreate_cm(self):
        return whole()  # each call of a decorated function has its own

    def _later(self, number, frame):
        self._came.append((number, frame))

    def _restore(self):
        """Puts all handlers back. What one raises that is back already, and runs meanwhile, is returned."""
        raised = None
        while True:
            try:
                for number, handler in self._saved:
                    signal.signal(number, handler)
                return raised
            except BaseException as e:
                raised = e

    def __exit__(self, *exc):
        raised = self._restore()
        handlers = dict(self._saved)
        came, self._came, frame = self._came, [], None
        try:
            for number, frame in came:
                try:
                    handlers[number](number, frame)
                except BaseException as e:  # the others are called all the same
                    raised = e
            if raised is not None:
                raise raised
            return False
        finally:  # an exception that its own frame holds would keep all of the frames above, and the optimizer in them
            del raised, came, frame
