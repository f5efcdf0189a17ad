// Package runbook holds operating experience as data: for each step of a workspace's sagas the likely cause if it hangs
// or fails, and what to do about it; for each reason of a node's verdict what to check and what to do.
//
// It owns the texts alone. It reads no run and never decides anything: lifecycle names the steps, and a program that
// displays a step looks its row up here. The pages of docs/runbooks are made of the reasons.
//
// Guarantees: a row has both texts or does not exist; a test of lifecycle verifies that every step of every definition
// has its row and that every row is of an existing step. A test of recovery verifies the same of every reason.
//
// It is a package of its own, and not a part of policy, because the two have only readers in common: policy has numbers
// that an operator may set within bounds, this package has texts for a person that follow the names of lifecycle's
// steps.
package runbook
