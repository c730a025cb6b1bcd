"""Estimates of the KL by token (Schulman 2020), beside the core's k3. d: the
reference's log-prob less the policy's.

On average k1 has no gradient in the loss without its correction by the ratio, and k2 and k3 have
hardly any in the reward."""


def k1(d):
    return -d


k1.may_be_negative = True


def k2(d):
    return d.square() / 2


k2.uncorrected = True   # it has the KL's gradient on fresh rollouts alone
