package replicas

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
)

// Trust is what a replica publishes of its agents' port.
type Trust struct {
	AgentAddress string   // host:port at which the replica itself serves agents
	ClientCAs    []string // fingerprints of the certificates that it trusts as issuers of nodes, sorted
}

// Trusting is a live replica with what it trusts. Both are empty for a replica of a build that does not publish them.
type Trusting struct {
	ReplicaID    string   `db:"replica_id" expr:"@.replica_id::text"`
	AgentAddress string   `db:"agent_address"`
	ClientCAs    []string `db:"client_cas"`
}

// MostTrusting bounds the replicas whose trust is read at once.
const MostTrusting = 64

var (
	writeTrust = pg.Define(pg.RoleNodeAPI, "replicas.write_trust", `
		UPDATE mesh.replica r SET agent_address = $2, client_cas = $3 WHERE r.replica_id = $1`)

	readTrust = pg.Define(pg.RoleRecovery, "replicas.read_trust", `
		SELECT `+pg.Columns[Trusting]("r")+` FROM mesh.replica r WHERE `+Listens("r")+`
		ORDER BY r.replica_id LIMIT $1`)
)

// WriteTrust writes what a replica trusts into its row, which its first beat makes. It is called when that has changed,
// not with each beat.
func WriteTrust(ctx context.Context, q pg.Querier, replicaID string, t Trust) error {
	if _, err := pg.Exec(ctx, q, writeTrust, replicaID, t.AgentAddress, t.ClientCAs); err != nil {
		return fmt.Errorf("write what the replica trusts: %w", err)
	}
	return nil
}

// ReadTrust returns the replicas that listen to agents with what they trust, MostTrusting at most.
func ReadTrust(ctx context.Context, q pg.Querier) ([]Trusting, error) {
	list, err := pg.All[Trusting](ctx, q, readTrust, MostTrusting)
	if err != nil {
		return nil, fmt.Errorf("read what replicas trust: %w", err)
	}
	return list, nil
}
