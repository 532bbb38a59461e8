"""Dumps written by hand, for the tests of `python -m penstock.trace hang`."""

import json

from made_traces import BASE_NS, RankTrace

SECOND = 1_000_000_000


class RankDump(RankTrace):
    """A dump of one rank, written ten seconds after its times begin; ages are seconds."""

    def __init__(self, rank, world_size=3, cause="deadline", status="ETIMEDOUT", **head):
        super().__init__(rank, world_size=world_size)
        self.rank = rank
        self.head = self.content["penstock"]["dump"] = {
            "name": "Net-1",
            "host": "here",
            "pid": 1000 + rank,
            "written": BASE_NS + 10 * SECOND,
            "cause": cause,
            "status": status,
            "reason": "",
            **{name: [] for name in ("places", "waits", "tasks", "gates", "launches")},
            **head,
        }

    def place(self, rank, text, age=1.0):
        place = {"rank": rank, "place": text, "age_ns": int(age * SECOND)}
        self.head["places"].append(place)
        return self

    def launched(self, task, ticket, lane="gather"):
        self.head["launches"].append({"task": task, "lane": lane, "ticket": ticket})
        return self

    def waits(self, task, ticket, age=5.0, lane="gather", why=""):
        part = {"task": task, "lane": lane, "graph": "forward", "ticket": ticket}
        part["age_ns"] = int(age * SECOND)
        self.head["waits"].append({**part, "for": why})
        if lane:
            self.head["tasks"].append({**part, "state": "launched"})
            self.launched(task, ticket, lane)
        return self

    def save(self, folder):
        path = folder / f"{self.head['name']}-rank{self.rank}.json"
        path.write_text(json.dumps(self.content))
        return path
