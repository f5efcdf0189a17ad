package gate

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// DiskFull reads the gates of all nodes whose agents last reported no room.
func DiskFull(ctx context.Context, q pg.Querier) ([]Gate, error) {
	out, err := all(ctx, q, fullGates)
	if err != nil {
		return nil, fmt.Errorf("read gates of full disks: %w", err)
	}
	return out, nil
}

// SetHost stores the facts that the gate's session reports of its host, and appends the gate's event if they differ
// from the stored ones.
func SetHost(ctx context.Context, tx pgx.Tx, nodeID, sessionID string, facts *commonv1.HostFacts) error {
	host, err := protojson.Marshal(facts)
	if err != nil {
		return fmt.Errorf("encode host facts: %w", err)
	}
	g, err := one(ctx, tx, setHost, nodeID, sessionID, host)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("write host facts: %w", err)
	}
	if _, err := events.Append(ctx, tx, g.event()); err != nil {
		return fmt.Errorf("report gate: %w", err)
	}
	return nil
}
