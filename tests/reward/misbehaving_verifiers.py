"""Reward functions that misbehave, for pool_test to load by name as a user's would be."""

import os
import pathlib
import signal
import subprocess
import time


def by_name(prompt, response_text):
    """Does what the response says."""
    match response_text.split():
        case ["length"]:
            return len(prompt.text)
        case ["number", value]:
            return float(value)
        case ["bool"]:
            return True
        case ["numpy"]:
            import numpy as np

            return np.float32(0.5)
        case ["text"]:
            return "1.0"
        case ["none"]:
            return None
        case ["huge"]:
            return 10**400
        case ["raise"]:
            raise ZeroDivisionError("of the verifier")
        case ["sleep"]:
            time.sleep(600)
        case ["tower"]:
            return 9**9**9**9  # holds the GIL: no thread or alarm could stop it
        case ["memory"]:
            return len(bytearray(8 << 30))
        case ["exit"]:
            os._exit(0)
        case ["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["child", path]:
            child = subprocess.Popen(["sleep", "600"])
            pathlib.Path(path).write_text(str(child.pid))
            child.wait()
        case ["process"]:
            return os.getpid()
    return 0.0


not_a_function = 3
