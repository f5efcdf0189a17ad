// Package runbook holds the operating experience with each step of a workspace's sagas, as data: the likely cause of a
// step that hangs or fails, and what to do about it.
//
// It owns the texts alone. It reads no run and never decides anything: lifecycle names the steps, and a program that
// displays a step looks its row up here.
//
// Guarantees: a row has both texts or does not exist; a test of lifecycle verifies that every step of every definition
// has its row and that every row is of an existing step.
//
// It is a package of its own, and not a part of policy, because the two have only readers in common: policy has numbers
// that an operator may set within bounds, this package has texts for a person that follow the names of lifecycle's
// steps.
package runbook
