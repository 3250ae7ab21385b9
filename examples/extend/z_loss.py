"""The z-loss (Chowdhery et al. 2022, PaLM, section 5): log^2 Z keeps the sum of exponentials of the logits near 1.

Run file: [loss.z] with weight = 1e-4.
"""

from ingot.plugins.loss import LOSS_TERMS, LossTermPart


def z_loss(logits, targets, vocabulary, options):
    largest = vocabulary.largest(logits.amax(-1))
    exponentials = (logits - largest[:, None]).exp()
    total = vocabulary.sum(exponentials.sum(-1))
    log_z = total.log() + largest
    return log_z.square(), exponentials * (2 * log_z / total)[:, None]  # d log Z / d logits = softmax


LOSS_TERMS.register(LossTermPart(name="z", term=z_loss, tensors=2))
