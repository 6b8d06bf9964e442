"""What predict says of how far it is."""

from enginery.core.datasets.batches import RowBatch
from enginery.predict.batch_predictor import with_share


class Reader:
    """A dataset of four batches."""

    def __init__(self):
        self.read_rows = 0

    def read(self, skip):
        for first in range(skip, 8, 2):
            self.read_rows = first + 2
            yield RowBatch(first, None, [("a",), ("b",)])

    def fraction_read(self):
        return self.read_rows / 8


def test_a_batch_has_the_share_up_to_its_end_however_far_the_reader_is():
    assert [batch.done for batch in list(with_share(Reader(), 0))] == [0.25, 0.5, 0.75, 1.0]
    assert [batch.done for batch in list(with_share(Reader(), 4))] == [0.75, 1.0]
