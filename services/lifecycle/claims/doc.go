// Package claims is the ledger of what runs have made: each resource has a claim from before it is made until it is
// confirmed gone. It owns lifecycle.resource_claim, and each change of a row appends its event in the same transaction.
//
// A claim is intended before the call that makes the resource, confirmed when the resource is known to exist, released
// when it is known to be gone, and orphaned when it was decided to go on without knowing. An undo works from the
// claims, so that what a step made before its driver crashed is undone too. Which run may write is the caller's to
// check, in the same transaction: this package knows no lease.
package claims
