"""Spoken digits, by espeak-ng: the only sounds of the training that are not computed.

python -m training.voices     (needs the program `espeak-ng`; writes training/data/voices.npz)
"""

from __future__ import annotations

import io
import random
import subprocess
import wave

import numpy as np
import numpy.typing as npt

from training.data.sounds import BANK, RATE, WORDS

ACCENTS = ("en-gb", "en-us", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-rp", "en-gb-x-gbcwmd")
VARIANTS = ("m1", "m2", "m3", "m4", "m7", "f1", "f2", "f3", "f4", "f5")
TAKES = 4
"""Recordings of a word in one accent and variant, each with a pitch and speed of its own."""
SEED = 20261123


def spoken(word: str, voice: str, pitch: int, speed: int) -> npt.NDArray[np.int16]:
    """One word at `RATE` samples a second, without the silence around it."""
    command = ["espeak-ng", "--stdout", "-v", voice, "-p", str(pitch), "-s", str(speed), word]
    made = subprocess.run(command, check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(made)) as file:
        rate = file.getframerate()
        samples = np.frombuffer(file.readframes(10**7), "<i2").astype(np.float32)
    loud = np.flatnonzero(np.abs(samples) > 300)
    samples = samples[loud[0] : loud[-1] + 1]
    at = np.arange(0, len(samples) - 1, rate / RATE)
    return np.interp(at, np.arange(len(samples)), samples).astype(np.int16)


def main() -> None:
    rng = random.Random(SEED)
    clips: dict[str, npt.NDArray[np.int16]] = {}
    for digit, word in enumerate(WORDS):
        for accent in ACCENTS:
            for variant in VARIANTS:
                for take in range(TAKES):
                    pitch, speed = rng.randint(20, 80), rng.randint(130, 210)
                    voice = f"{accent}+{variant}"
                    clips[f"{digit}:{voice}:{take}"] = spoken(word, voice, pitch, speed)
    np.savez_compressed(BANK, **clips)  # type: ignore[arg-type, unused-ignore]
    print(f"{len(clips)} recordings, {BANK.stat().st_size} bytes")


if __name__ == "__main__":
    main()
