// Package placement is how boxes come to be: the contract of its drivers.
//
// A driver owns its launch ledger and believes nothing else about what it launched. Guarantees of every driver: Launch is idempotent on (workspace,
// epoch); an epoch below the highest seen is refused; epoch n+1 is refused until n is confirmed ended, or fenced on a
// person's word; an ended (workspace, epoch) is never launched
// again; everything made is listed.
package placement

import (
	"context"
	"time"
)

// Box is what is to be launched.
type Box struct {
	WorkspaceID string
	TenantID    string
	Epoch       int64
	InstanceID  string
	NodeName    string
	NodeID      string // of the machine, for a driver that does not make one
	// LaunchSecret lets the box enrol, once.
	LaunchSecret string
	GPUs         int32
}

// Launched is what a driver made.
type Launched struct {
	ProviderID string
	StartedAt  time.Time
}

// Instance is one line of a driver's list.
type Instance struct {
	WorkspaceID string
	Epoch       int64
	InstanceID  string
	ProviderID  string
	StartedAt   time.Time
	EndedAt     time.Time // zero while it lives
	// Strays counts the processes of it that were found running after its end, and were ended, when that last happened; zero: none ever.
	Strays   int
	StraysAt time.Time
}

// Driver makes and ends boxes.
type Driver interface {
	// Launch makes the box, or answers the one that is there. Refusals are faults: epoch_superseded, epoch_ended, previous_epoch_alive,
	// no_capacity; launch_failed may be tried again.
	Launch(ctx context.Context, box Box) (Launched, error)
	// End ends the box and all that runs on it, and returns once that is confirmed. A box that never was is confirmed at once. Either way
	// (workspace, epoch) is never launched afterwards.
	End(ctx context.Context, workspaceID string, epoch int64) error
	// Fence writes down that (workspace, epoch) counts as ended on a person's word, where End cannot confirm it: it is never launched afterwards and stands
	// in the way of no later epoch. Nothing is ended by it, and what cannot be confirmed gone stays in List until it is.
	Fence(ctx context.Context, workspaceID string, epoch int64, word string) error
	// List answers everything that was ever launched.
	List(ctx context.Context) ([]Instance, error)
}
