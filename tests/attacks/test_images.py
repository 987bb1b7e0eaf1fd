import numpy as np
import pytest
import torch

from privfed.attacks.images import ImageShape

COLOURS = ImageShape(channels=3, height=4, width=5)


def test_a_row_is_an_image_with_channels_first() -> None:
    rows = np.arange(120.0).reshape(2, 60)
    images = COLOURS.images(rows)
    assert images.shape == (2, 3, 4, 5)
    assert images[1, 2, 3, 4] == 119
    torch.testing.assert_close(torch.nn.Unflatten(1, (3, 4, 5))(torch.tensor(rows)), torch.tensor(images))


def test_the_schema_has_a_column_from_0_to_1_for_each_pixel() -> None:
    schema = COLOURS.schema()
    assert schema.width == COLOURS.pixels == 60
    assert not schema.blocks
    assert schema.low.tolist() == [0] * 60
    assert schema.high.tolist() == [1] * 60
    assert schema.columns[59].name == "pixel (2, 3, 4)"


def test_total_variation_is_the_sum_of_steps_between_neighbours() -> None:
    rows = np.zeros((2, 60))
    rows[0, [0, 7]] = 0.5, 0.25
    # A corner has two neighbours, an inner pixel four; each of the 93 differences is rounded off by at most 0.001.
    expected = np.array([2 * 0.5 + 4 * 0.25, 0])
    assert (np.abs(COLOURS.variation(torch.tensor(rows)).numpy() - expected) <= 93 * 1e-3).all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="positive sizes, got 3, 0 and 4"):
        ImageShape(channels=3, height=0, width=4)
    with pytest.raises(ValueError, match="rows of 60 pixels"):
        COLOURS.images(np.zeros((2, 61)))
