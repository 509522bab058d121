import sys; sys.path.insert(0,'/work/w/grid/tests/strategies')
import pipelines, serial_pipelines, pytest
@pytest.mark.parametrize("s,n",[("pipeline:1f1b:pp=2:shard=2",4),("pipeline:zbv:pp=2:shard=2",4),("pipeline:1f1b:pp=2:shard=2:reshard=true",4),("pipeline:interleaved:pp=2:shard=2",4),("pipeline:zero-bubble:pp=2:shard=2",4),("pipeline:gpipe:pp=2:shard=2",4),("pipeline:1f1b:pp=2:shard=2",8)])
def test_x(ranks, s,n):
    cases=["tied, clipped, accumulated","BatchNorm, accumulated", "frozen, clipped", "found, accumulated"]
    results=ranks(n,pipelines.train,s+":microbatches=4",cases)
    for c in cases: serial_pipelines.assert_as_serial(results,c,s+":microbatches=4")
