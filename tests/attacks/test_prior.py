import numpy as np
import pytest
import torch
from scipy.special import ndtr

from privfed.attacks.facts import OneHot, TableSchema
from privfed.attacks.prior import Prior


def test_typical_records_have_median_numbers_and_the_public_frequencies(fraud_table, fraud_prior) -> None:
    guess = fraud_prior.guess(3)
    assert guess.shape == (3, 50)
    np.testing.assert_array_equal(guess[0], guess[2])
    np.testing.assert_allclose(guess[0, :20], np.median(fraud_table.public[:, :20], axis=0), atol=0.01)
    np.testing.assert_allclose(guess[0, 20:], fraud_table.public[:, 20:].mean(axis=0), atol=0.002)


def test_normal_scores_become_the_numbers_of_the_same_rank(fraud_table, fraud_prior) -> None:
    for score in (-2.0, -0.5, 1.3):
        variables = torch.zeros(50)
        variables[:20] = score
        expected = np.quantile(fraud_table.public[:, :20], ndtr(score), axis=0)
        spread = fraud_table.public[:, :20].std(axis=0)
        # The table of quantiles has a knot every tenth of a standard deviation, 3000 records have ranks that coarse in the tails.
        assert (np.abs(fraud_prior.records(variables)[:20].numpy() - expected) < 0.1 * spread).all()


def test_the_typical_record_has_the_least_energy(fraud_prior) -> None:
    typical = fraud_prior.typical().requires_grad_()
    energy = fraud_prior.energy(typical)
    (slope,) = torch.autograd.grad(energy, typical)
    assert slope.abs().max() < 1e-5
    others = typical.detach() + torch.randn(100, 50, generator=torch.Generator().manual_seed(0))
    assert (fraud_prior.energy(others) > energy).all()


def test_the_energy_knows_which_numbers_go_together(fraud_table, fraud_prior) -> None:
    correlation = np.corrcoef(fraud_table.public[:, 5:20].T) - np.eye(15)
    first, second = np.unravel_index(np.abs(correlation).argmax(), correlation.shape)
    together, apart = fraud_prior.typical(), fraud_prior.typical()
    sign = float(np.sign(correlation[first, second]))
    together[5 + first], together[5 + second] = 1.5, 1.5 * sign
    apart[5 + first], apart[5 + second] = 1.5, -1.5 * sign
    assert fraud_prior.energy(together) < fraud_prior.energy(apart)


def test_the_curvature_is_the_energys_second_derivative_at_the_typical_record(fraud_prior) -> None:
    hessian = torch.autograd.functional.hessian(fraud_prior.energy, fraud_prior.typical()).double()
    curvature = fraud_prior.curvature(1)
    torch.testing.assert_close(curvature[:20, :20], hessian[:20, :20], rtol=1e-3, atol=1e-3)
    # Categories are held independently of each other: the diagonal alone, and never nothing.
    torch.testing.assert_close(curvature.diagonal()[20:], hessian.diagonal()[20:].clamp(min=1e-4), rtol=0.02, atol=1e-3)
    two = fraud_prior.curvature(2)
    torch.testing.assert_close(two[50:, 50:], curvature)
    assert (two[:50, 50:] == 0).all()


def test_variables_near_a_public_record_become_that_record(fraud_table, fraud_prior) -> None:
    records = fraud_prior.records(fraud_prior.variables_near(torch.tensor([3, 77]))).numpy()
    truth = fraud_table.public[[3, 77]]
    spread = fraud_table.public[:, :20].std(axis=0)
    assert (np.abs(records[:, :20] - truth[:, :20]) < 0.1 * spread).all()
    for block in fraud_table.schema.blocks:
        np.testing.assert_array_equal(records[:, block].argmax(axis=1), truth[:, block].argmax(axis=1))


def test_entropy_is_all_left_at_the_frequencies_and_gone_for_a_whole_category(fraud_prior) -> None:
    np.testing.assert_allclose(fraud_prior.entropy_left(fraud_prior.typical()).numpy(), 1.0, atol=1e-5)
    certain = fraud_prior.typical()
    certain[[20, 22, 25, 30, 38]] = 30.0
    np.testing.assert_allclose(fraud_prior.entropy_left(certain).numpy(), 0.0, atol=1e-5)


def test_tables_of_numbers_or_of_categories_alone_are_fine(generate_table) -> None:
    for kinds in ({"numeric": 4, "categories": ()}, {"numeric": 0, "categories": (2, 3)}):
        table = generate_table(count=50, **kinds)
        prior = Prior(rows=table.rows, labels=table.labels, schema=table.schema)
        records = prior.records(prior.typical().repeat(2, 1))
        assert records.shape == (2, table.schema.width)
        assert prior.energy(prior.typical()).shape == ()
        assert prior.curvature(2).shape == (2 * table.schema.width,) * 2
        assert prior.entropy_left(prior.typical()).shape == (len(table.schema.blocks),)


def test_other_shapes_and_schemas_are_refused(fraud_table, fraud_prior) -> None:
    rows, labels, schema = fraud_table.public, fraud_table.public_labels, fraud_table.schema
    for facts in ({"rows": rows[:, :49]}, {"rows": rows[:1], "labels": labels[:1]}, {"labels": labels[:-1]}):
        with pytest.raises(ValueError, match="expected at least two public records of 50 columns"):
            Prior(**({"rows": rows, "labels": labels, "schema": schema} | facts))
    fraud_prior.check(schema)
    with pytest.raises(ValueError, match="another schema"):
        fraud_prior.check(TableSchema(columns=(OneHot(name="kind", categories=("a", "b")),)))
