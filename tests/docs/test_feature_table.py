"""The table of training features has a row for each feature that is tested, and every case passed."""

from __future__ import annotations

from collections import Counter

from tests.trainer.feature_table import PAGE, table
from tests.trainer.test_training_features import FEATURES, POSITIONS, WORLDS


def test_the_page_has_the_table_of_a_run_in_which_every_case_passed() -> None:
    passed = Counter({(feature, position): len(WORLDS) for feature in FEATURES for position in POSITIONS})
    assert table(passed) in PAGE.read_text()
