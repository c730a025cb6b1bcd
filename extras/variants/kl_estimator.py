"""Estimates of the KL by token (Schulman 2020), beside the core's k3. d: the
reference's log-prob less the policy's.

Without the correction by the ratio, k1 in the loss has an expected gradient of zero. In the reward,
k2 and k3 have almost none."""


def k1(d):
    return -d


def k2(d):
    return d.square() / 2


k2.uncorrected = True   # it has the KL's gradient on fresh rollouts alone
