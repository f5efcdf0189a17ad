// Package allocation decides what a workspace holds: its allocation, the instance that belongs to it and the claims on
// both; how a machine is chosen for it, and when it is given back or given up. It owns lifecycle.allocation,
// lifecycle.instance and lifecycle.unaccounted_instance; each change is a compare-and-set with its event in the same
// transaction.
package allocation
