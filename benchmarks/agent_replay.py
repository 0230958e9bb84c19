"""An agent's session, replayed: a conversation that grows by a tool call or a question a turn.

    python benchmarks/agent_replay.py --peers-python PEERS/bin/python [--model tiny] [--turns 30]

Every request starts with the billing header that Claude Code puts before its system prompt, and
whose hash changes each time. The assistant's turns are scripted, so that every server reads the
same conversation; each is asked for a few tokens. What counts is how much of the prompt a server
computes again (prompt tokens less the cached ones it reports), and the time to the first token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from named_models import model_folder
from report import update_readme
from servers import SERVERS, Server, StartError, running

from quire.cli.bench import ROUTES, run_async
from quire.cli.load import LoadError, Target, Timings, send

HERE = Path(__file__).parent
TIMEOUT_S = 120.0
WORDS = ("file", "line", "test", "error", "read", "write", "check", "value", "list", "path", "run")

Message = dict[str, Any]


def tool(name: str, *parameters: str) -> Message:
    """Return an OpenAI tool whose parameters are all strings."""
    properties = {key: {"type": "string", "description": f"the {key}"} for key in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": f"Runs {name} in the project.", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (
    tool("read_file", "path"),
    tool("write_file", "path", "content"),
    tool("search", "pattern", "folder"),
    tool("shell", "command"),
)


@dataclass(frozen=True, slots=True)
class Session:
    """The conversation, as a function of the turn.

    Attributes:
        system_words: length of the part of the system prompt that never changes.
        turn_words: length of each question and tool result.
        name: of several sessions; what is asked and answered differs by it.
        keyed: whether requests say which session they are of, in `prompt_cache_key`.
    """

    turns: int
    system_words: int
    turn_words: int
    name: str = ""
    keyed: bool = False

    def _text(self, name: str, words: int) -> str:
        return " ".join(random.Random(name).choices(WORDS, k=words))

    def messages(self, turn: int) -> list[Message]:
        """Return what the client sends at `turn`, counted from 0."""
        changing = hashlib.sha256(str(turn).encode()).hexdigest()
        header = (
            f"x-anthropic-billing-header: cc_version=2.1.37.{changing[:3]}; "
            f"cc_entrypoint=cli; cch={changing[3:8]};"
        )
        system = f"{header}\n{self._text('system', self.system_words)}"
        messages: list[Message] = [{"role": "system", "content": system}]
        for past in range(turn + 1):
            messages += self._asked(past)
            if past < turn:
                messages.append(self._answered(past))
        return messages

    def _asked(self, turn: int) -> list[Message]:
        """Return a tool's result at two of three turns, else a question."""
        content = self._text(f"asked {self.name}{turn}", self.turn_words)
        if turn % 3:
            return [{"role": "tool", "tool_call_id": f"call_{turn - 1}", "content": content}]
        return [{"role": "user", "content": content}]

    def _answered(self, turn: int) -> Message:
        if (turn + 1) % 3 == 0:
            return {"role": "assistant", "content": self._text(f"answered {self.name}{turn}", 20)}
        arguments = json.dumps({"path": f"src/{turn}.py"})
        function = {"name": "read_file", "arguments": arguments}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def body(self, model: str, turn: int, max_tokens: int) -> bytes:
        """Return the request of a turn."""
        key = {"prompt_cache_key": self.name} if self.keyed else {}
        return json.dumps(
            {
                **key,
                "model": model,
                "messages": self.messages(turn),
                "tools": TOOLS,
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


async def replay(target: Target, model: str, session: Session, max_tokens: int) -> list[Timings]:
    """Play all turns, one after the other.

    Raises:
        LoadError: a turn failed.
    """
    answers = []
    for turn in range(session.turns):
        body = session.body(model, turn, max_tokens)
        answer = await send(target, ROUTES["chat"], body, TIMEOUT_S)
        if answer.error is not None:
            raise LoadError(f"turn {turn + 1}: {answer.error}")
        answers.append(answer)
    return answers


def summarise(answers: list[Timings]) -> dict[str, Any]:
    """Return totals and times. `computed_tokens` is None where a server reports no cached
    tokens.
    """
    sent = sum(answer.prompt_tokens or 0 for answer in answers)
    reported = [answer.cached_tokens for answer in answers]
    cached = None if None in reported else sum(count or 0 for count in reported)
    # A turn whose tokens made no text counts from its end.
    times = [
        round(1e3 * (answer.ended - answer.started if answer.ttft is None else answer.ttft), 2)
        for answer in answers
    ]
    return {
        "prompt_tokens": sent,
        "computed_tokens": None if cached is None else sent - cached,
        "first_turn_ms": times[0],
        "later_turns_ms": median(times[1:]),
        "last_turn_ms": times[-1],
        "ttft_ms": times,
        "cached_tokens": reported,
    }


def measure(server: Server, model: Path, session: Session, args: argparse.Namespace) -> Message:
    """Replay the session on one server, with its prefix cache on."""
    name = model.name if server.package == "quire" else str(model)
    try:
        with running(server, str(model), args.peers_python, reuse=True) as (target, _):
            answers = run_async(replay(target, name, session, args.max_tokens))
    except StartError as error:
        return {"error": str(error)}
    return summarise(answers)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--peers-python", default=sys.executable, help="python of the peers' environment")
    add("--model", default="tiny", help="tiny, demo, or a folder")
    add("--turns", type=int, default=30)
    add("--system-words", type=int, default=600)
    add("--turn-words", type=int, default=60)
    add("--max-tokens", type=int, default=16)
    add("--only", action="append", help="a server's name; may be given again")
    add("--out", type=Path, help="default: results/agent-MODEL.json")
    args = parser.parse_args()
    shown = sys.argv[1:]
    args.shown = ["PEERS/bin/python" if part == args.peers_python else part for part in shown]
    args.out = args.out or HERE / "results" / f"agent-{Path(args.model).name}.json"
    return args


def main() -> None:
    """Replays the session on every server and writes down what it cost."""
    args = parse()
    session = Session(args.turns, args.system_words, args.turn_words)
    contenders: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="quire-model-") as folder:
        model = model_folder(args.model, Path(folder))
        for server in SERVERS:
            if not args.only or server.name in args.only:
                one = measure(server, model, session, args)
                contenders[server.name] = one
                print(f"{server.name}: {json.dumps(one)}", flush=True)
    report = {
        "model": args.model,
        "command": shlex.join(["python", "benchmarks/agent_replay.py", *args.shown]),
        "turns": args.turns,
        "contenders": contenders,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    update_readme(HERE / "results" / "runs.md", HERE / "results")


if __name__ == "__main__":
    main()
