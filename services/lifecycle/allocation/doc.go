// Package allocation decides what a workspace holds: its allocation, the instance that belongs to it and the claims on
// both; how a machine and its devices are chosen for it, how it passes to the next epoch, and when it is given back or
// given up. It records on the workspace whether the instance registers. It owns lifecycle.allocation,
// lifecycle.instance and lifecycle.unaccounted_instance; each change is a compare-and-set with its event in the same
// transaction. It runs no step and asks no agent.
package allocation
