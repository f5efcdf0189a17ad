// Package placement is the contract of the drivers that launch and end instances.
//
// A driver owns its launch log and trusts nothing else about what it launched. Guarantees of every driver: Launch is
// idempotent on (workspace, epoch, instance); another instance at an epoch that has one is refused, because the
// existing one is of a history that the database lost; an epoch below the highest seen is refused; epoch n+1 is refused
// until n is confirmed ended, or fenced by an attestation; an ended (workspace, epoch) is never launched again; every
// instance that was made is listed.
package placement

import (
	"context"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// LaunchRequest is an instance to be launched.
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
	// Permit is called right before a new launch is recorded, under the locks under which the driver decides. If it
	// returns an error, nothing is launched. May be nil.
	Permit func(ctx context.Context) error
}

// Permitted calls the request's Permit, if it has one.
func (b LaunchRequest) Permitted(ctx context.Context) error {
	if b.Permit == nil {
		return nil
	}
	return b.Permit(ctx)
}

// Launched is an instance that a driver made.
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
	EndedAt     time.Time // zero while it has not ended
	// Strays is how many of its processes were found running after its end, and were ended, at the last such time,
	// StraysAt; zero: none ever.
	Strays   int
	StraysAt time.Time
}

// Driver makes and ends instances.
type Driver interface {
	// Launch makes the instance, or returns the existing one if it is the same instance. Refusals are faults:
	// instance_of_lost_history, epoch_superseded, epoch_ended, previous_epoch_alive, no_capacity; launch_failed may be
	// tried again.
	Launch(ctx context.Context, request LaunchRequest) (Launched, error)
	// End ends the instance and everything that runs on it, and returns once that is confirmed. For an instance that was
	// never launched it returns at once. Either way (workspace, epoch) is never launched afterwards.
	End(ctx context.Context, workspaceID string, epoch int64) error
	// Fence records that (workspace, epoch) counts as ended by a person's attestation, if End cannot confirm it: it is
	// never launched afterwards and does not prevent a later epoch. Fence ends nothing, and an instance whose end is not
	// confirmed stays in List until it is.
	Fence(ctx context.Context, workspaceID string, epoch int64, attestation string) error
	// List returns everything that was ever launched. Callers that poll use Standing.
	List(ctx context.Context) ([]Instance, error)
	// Standing returns the instances of List that have not ended, and those in which processes were found after their end.
	// Its cost does not grow with the number of ended instances.
	Standing(ctx context.Context) ([]Instance, error)
}

// LogEntry is the content of a launch log about one (workspace, epoch).
type LogEntry struct {
	WorkspaceID string
	Epoch       int64
	InstanceID  string // empty if it was never launched
	// First is the number of the first line about it, Ended that of the line that began its end; zero while it has not
	// ended.
	First, Ended int64
	Fenced       bool // it counts as ended by a person's attestation
}

// LaunchLog is a driver's own record of what it launched.
type LaunchLog struct {
	ID      string // drawn when the log was begun; every log has its own
	Seq     int64  // the number of its last line; it never falls, unless the log is replaced by an older one
	Entries []LogEntry
}

// Logged is a driver whose launch log is outside the database, so that a restore of the database leaves the log as it
// is, and the other way round.
type Logged interface {
	LaunchLog(ctx context.Context) (LaunchLog, error)
	// Forget removes workspaces without any row in the database from the log, unless one of their instances has not ended,
	// and returns how many lines it removed. The numbers of the other lines, and of later ones, stay as they are.
	Forget(ctx context.Context, workspaceIDs []string) (int, error)
}

// LostHistory returns the refusal of an instance whose epoch has another instance at the driver already: evidence that
// the database was restored to an earlier state.
func LostHistory(providerID, have string, asked LaunchRequest) error {
	return fault.New(commonv1.Reason_REASON_INSTANCE_OF_LOST_HISTORY,
		fmt.Sprintf("epoch %d of the workspace has instance %s at the placement, and %s was asked for", asked.Epoch, have,
			asked.InstanceID),
		fault.Conflicting(providerID))
}
