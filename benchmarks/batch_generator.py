"""mlx-lm's BatchGenerator alone, without HTTP. Run by `peers.py` in the peers' environment."""

from __future__ import annotations

import time

from alone import Work, main
from mlx_lm import load
from mlx_lm.generate import BatchGenerator


def measure(work: Work) -> dict[int, float]:
    """Return tokens per second at each number of streams, each stream taking the next prompt when
    free.
    """
    model, _ = load(work.model)
    rates: dict[int, float] = {}
    for streams, prompts in ((len(work.warm_up), work.warm_up), *work.levels):
        generator = BatchGenerator(
            model, max_tokens=work.max_tokens, stop_tokens=[[token] for token in work.stop_ids]
        )
        tokens = done = 0
        started = time.perf_counter()
        waiting = iter(prompts)
        generator.insert([list(next(waiting)) for _ in range(streams)])
        while done < len(prompts):
            _, responses = generator.next()
            tokens += len(responses)
            for response in responses:
                if response.finish_reason is not None:
                    done += 1
                    following = next(waiting, None)
                    if following is not None:
                        generator.insert([list(following)])
        rates[streams] = tokens / (time.perf_counter() - started)
        generator.close()
    return {streams: rates[streams] for streams, _ in work.levels}


if __name__ == "__main__":
    main(measure)
