"""The reference follows the policy, from time to time by a share of the way."""
import torch


@torch.no_grad()
def sync_reference(setup, alpha):
    """reference <- (1 - alpha) reference + alpha policy -> metrics.

    Metrics:
        ref_tensors_differing: tensors that differ from the policy's right after the reference
            followed it; 0 after a copy
        ref_distance_left: share of the reference's distance that is left then, 1 - alpha
    """
    # weight by weight, and how far apart they are before and after
    pairs = list(zip(setup.reference.parameters(), setup.policy.parameters(), strict=True))
    before = torch.stack([(r - p).norm() for r, p in pairs]).norm()
    for r, p in pairs:
        r.lerp_(p, alpha)
    after = torch.stack([(r - p).norm() for r, p in pairs]).norm()
    differ = torch.stack([(r != p).any() for r, p in pairs]).sum()
    return {"ref_tensors_differing": int(differ), "ref_distance_left": float(after / before)}


def follow(setup, done, cfg):
    """What the reference does after `done` iterations -> metrics."""
    is_due = done % cfg.ref_model_sync_steps == 0
    return sync_reference(setup, cfg.ref_model_mixup_alpha) if is_due else {}
