"""The kind of study: what its ranks do, how a campaign runs it, and what its page has. No torch here."""

from results.features import Kind

HOSTMEM = Kind(
    name="hostmem",
    cells="places to copy memory",
    work="bench_hostmem.worker:copy_memory",
    conduct="bench_hostmem.conduct:HostMemoryConduct",
    sections=("running", "hostmem", "outcomes", "review"),
    has_steps=False,
)
