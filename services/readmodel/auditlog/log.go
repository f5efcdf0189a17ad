package auditlog

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// ConsumerName is the name of the log's cursor.
const ConsumerName = "audit"

// Deps of the log. Numbered and Wake are the process's own.
type Deps struct {
	Logger         *slog.Logger
	DB             *pgxpool.Pool // logs in as readmodel
	Numbered, Wake *events.Signal
}

// Log writes and checks the audit log: its rows are in the order of their events' positions, and each has a hash that
// covers the row before it.
type Log struct {
	db       *pgxpool.Pool
	logger   *slog.Logger
	consumer *events.Consumer
	checking sync.Mutex
	keys     atomic.Pointer[CheckpointKeys]
	// signedUpTo is the number of the last checkpoint that this replica has signed.
	signedUpTo atomic.Int64
}

// New returns the log. It does not access the database.
func New(deps Deps) (*Log, error) {
	consumer, err := events.NewConsumer(events.ConsumerDeps{
		Pool: deps.DB, Numbered: deps.Numbered, Wake: deps.Wake,
		Logger: deps.Logger,
	}, events.ConsumerConfig{
		Name: ConsumerName, Schema: "readmodel", Kinds: []string{audit.Kind}, AsyncCommit: true,
	})
	if err != nil {
		return nil, fmt.Errorf("build consumer of the audit log: %w", err)
	}
	return &Log{db: deps.DB, logger: deps.Logger, consumer: consumer}, nil
}

// Run appends entries until ctx ends.
func (l *Log) Run(ctx context.Context) error {
	return l.consumer.Run(ctx, appendEntry)
}

// Drain appends everything that is numbered, for tests and tools.
func (l *Log) Drain(ctx context.Context) error {
	return l.consumer.Drain(ctx, appendEntry)
}

// WaitFor waits until a command's position token is in the log, as Projector.WaitFor does.
func (l *Log) WaitFor(ctx context.Context, token string) error {
	return project.WaitFor(ctx, l.consumer, token)
}

type headRow struct {
	Number int64  `db:"number"`
	Hash   []byte `db:"hash"`
}

var (
	lockHead = pg.Define(pg.RoleReadmodel, "auditlog.lock_audit_head",
		`SELECT number, hash FROM readmodel.audit_head FOR UPDATE`)
	insertRow = pg.Define(pg.RoleReadmodel, "auditlog.insert_audit", `
	INSERT INTO readmodel.audit (number, pos, event_id, source, entry, previous_hash, hash)
		VALUES ($1, $2, $3, $4, $5, $6, $7)`)
	moveHead = pg.Define(pg.RoleReadmodel, "auditlog.move_audit_head",
		`UPDATE readmodel.audit_head SET number = $1, hash = $2`)
)

// appendEntry implements events.Apply. The log has no gaps: an entry that cannot be appended is retried and never
// skipped.
func appendEntry(ctx context.Context, tx pgx.Tx, r events.Record) error {
	entry, err := canonical(r)
	if err != nil {
		return events.Later(err)
	}
	head, err := pg.One[headRow](ctx, tx, lockHead)
	if err != nil {
		return events.Later(fmt.Errorf("read end of the audit log: %w", err))
	}
	number := head.Number + 1
	hash := link(head.Hash, entry, r.ID, r.Source)
	err = pg.Queue(ctx, tx, insertRow, number, r.Pos, r.ID, r.Source, string(entry), head.Hash, hash)
	if err == nil {
		_, err = pg.Exec(ctx, tx, moveHead, number, hash)
	}
	if err != nil {
		return events.Later(fmt.Errorf("append to the audit log: %w", err))
	}
	return nil
}

// canonical returns the form of an entry that is hashed: the event's payload with its time and the service that wrote
// it, keys in order, no space. It is made from the stored JSON, so that it stays the same when a later build knows more
// fields.
func canonical(r events.Record) ([]byte, error) {
	stored, err := r.Payload()
	if err != nil {
		return nil, fmt.Errorf("read audit entry %s: %w", r.ID, err)
	}
	decoder := json.NewDecoder(bytes.NewReader(stored))
	decoder.UseNumber()
	var payload any
	if err := decoder.Decode(&payload); err != nil {
		return nil, fmt.Errorf("read audit entry %s: %w", r.ID, err)
	}
	entry, ok := payload.(map[string]any)
	if !ok {
		entry = map[string]any{"details": map[string]any{"payload": payload}}
	}
	entry["at"] = r.CreatedAt.UTC().Format(time.RFC3339Nano)
	if actor, _ := entry["actor"].(string); actor == "" {
		entry["actor"] = "service/" + r.Source
	}
	out, err := json.Marshal(entry)
	if err != nil {
		return nil, fmt.Errorf("encode audit entry %s: %w", r.ID, err)
	}
	return out, nil
}

// link returns the hash of a row. Each part is preceded by its length, so that no two different rows hash the same
// bytes.
func link(previous, entry []byte, eventID, source string) []byte {
	h := sha256.New()
	for _, part := range [][]byte{previous, entry, []byte(eventID), []byte(source)} {
		fmt.Fprintf(h, "%d:", len(part))
		h.Write(part)
	}
	return h.Sum(nil)
}
