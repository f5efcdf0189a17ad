// Package placement is how instances come to be: the contract of its drivers.
//
// A driver owns its launch log and believes nothing else about what it launched. Guarantees of every driver: Launch is idempotent on (workspace,
// epoch, instance); another instance at an epoch that has one is refused, for it is of a history that the database lost; an epoch below the highest seen
// is refused; epoch n+1 is refused until n is confirmed ended, or fenced on a person's word; an ended (workspace, epoch) is never launched again;
// everything made is listed.
package placement

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// LaunchRequest is what is to be launched.
type LaunchRequest struct {
	WorkspaceID string
	TenantID    string
	Epoch       int64
	InstanceID  string
	NodeName    string
	NodeID      string // of the machine, for a driver that does not make one
	// LaunchSecret lets the instance enrol, once.
	LaunchSecret string
	GPUs         int32
	// Permit is asked right before a new launch is written down, with whatever the driver holds to decide: what it refuses is not launched. May be nil.
	Permit func(ctx context.Context) error
}

// Permitted asks the instance's Permit, if it has one.
func (b LaunchRequest) Permitted(ctx context.Context) error {
	if b.Permit == nil {
		return nil
	}
	return b.Permit(ctx)
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

// Driver makes and ends instances.
type Driver interface {
	// Launch makes the instance, or returns the one that is there if it is the same instance. Refusals are faults: instance_of_lost_history, epoch_superseded,
	// epoch_ended, previous_epoch_alive, no_capacity; launch_failed may be tried again.
	Launch(ctx context.Context, box LaunchRequest) (Launched, error)
	// End ends the instance and all that runs on it, and returns once that is confirmed. An instance that never was is confirmed at once. Either way
	// (workspace, epoch) is never launched afterwards.
	End(ctx context.Context, workspaceID string, epoch int64) error
	// Fence writes down that (workspace, epoch) counts as ended on a person's word, where End cannot confirm it: it is never launched afterwards and stands
	// in the way of no later epoch. Nothing is ended by it, and what cannot be confirmed gone stays in List until it is.
	Fence(ctx context.Context, workspaceID string, epoch int64, word string) error
	// List returns everything that was ever launched. What looks often goes by Standing.
	List(ctx context.Context) ([]Instance, error)
	// Standing returns the instances of List that have not ended, and those in which processes were found after their end.
	// What it costs does not grow with what has ended.
	Standing(ctx context.Context) ([]Instance, error)
}

// LogEntry is what a launch log says of one (workspace, epoch).
type LogEntry struct {
	WorkspaceID string
	Epoch       int64
	InstanceID  string // empty if it never was launched
	// First is the number of the line with which the log began to speak of it, Ended of the line that began its end; zero while it stands.
	First, Ended int64
	Fenced       bool // it counts as ended on a person's word
}

// LaunchLog is a driver's own record of what it launched.
type LaunchLog struct {
	ID      string // drawn when the log was begun: another log has another one
	Seq     int64  // the number of its last line; it never falls, unless the log is replaced by an older one
	Entries []LogEntry
}

// Logged is a driver whose launch log is outside of the database, so that a restore of one leaves the other as it is.
type Logged interface {
	LaunchLog(ctx context.Context) (LaunchLog, error)
	// Forget takes workspaces of which nothing is left in the database out of the log, as far as nothing of them runs,
	// and returns how many lines went. The numbers of the other lines, and of later ones, stay as they are.
	Forget(ctx context.Context, workspaceIDs []string) (int, error)
}

// LostHistory returns the refusal of an instance whose epoch has another instance at the driver already: evidence that the database went back.
func LostHistory(providerID, have string, asked LaunchRequest) error {
	return fault.New(commonv1.Reason_REASON_INSTANCE_OF_LOST_HISTORY,
		fmt.Sprintf("epoch %d of the workspace has instance %s at the placement, and %s was asked for", asked.Epoch, have, asked.InstanceID),
		fault.Conflicting(providerID))
}
