package churn

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// The scopes of budgets.
const (
	ScopeWorkspace = "workspace"
	ScopePlacement = "placement"
)

// Wait is a budget that is used up, and the time until which it is.
type Wait struct {
	key
	rate  float64 // an hour
	Until time.Time
}

// By returns the budget as its scope, a colon and the id of the workspace or the name of the placement.
func (w *Wait) By() string { return w.scope + ":" + w.id }

// Because returns the cause as text.
func (w *Wait) Because() string {
	what := "the workspace has"
	if w.scope == ScopePlacement {
		what = "the instances of placement " + w.id + " have"
	}
	return fmt.Sprintf("%s used up the budget of recreations, %g an hour; the next one is possible at %s", what, w.rate,
		w.Until.UTC().Format(time.RFC3339))
}

// Target is a workspace that may be recreated.
type Target struct{ WorkspaceID, Placement string }

// Rate is the number of recreations an hour.
type Rate struct{ Workspace, Placement float64 }

// RateOf returns the rate for a placement with a number of instances, of which a fraction may fail together.
func RateOf(perWorkspace int, fraction float64, instances int32) Rate {
	each := float64(perWorkspace)
	return Rate{Workspace: each, Placement: each * math.Max(1, math.Ceil(fraction*float64(instances)))}
}

// key identifies a bucket.
type key struct{ scope, id string }

// bucket is the number of tokens of a bucket at a time.
type bucket struct {
	Scope  string    `db:"scope"`
	Key    string    `db:"key"`
	Tokens float64   `db:"tokens"`
	At     time.Time `db:"at"`
}

// level returns the tokens of a bucket after the elapsed time.
func level(tokens, rate float64, elapsed time.Duration) float64 {
	return math.Min(rate, tokens+rate*math.Max(elapsed.Hours(), 0))
}

var (
	readBuckets = pg.Define(pg.RoleRecovery, "churn.read_buckets", bucketsSQL)
	lockBuckets = pg.Define(pg.RoleRecovery, "churn.lock_buckets", bucketsSQL+` FOR UPDATE OF b`)

	setBuckets = pg.Define(pg.RoleRecovery, "churn.set_buckets", `
		INSERT INTO recovery.churn_bucket (scope, key, tokens, at)
		SELECT x.scope, x.key, x.tokens, x.at
		FROM unnest($1::text[], $2::text[], $3::float8[], $4::timestamptz[]) AS x (scope, key, tokens, at)
		ON CONFLICT (scope, key) DO UPDATE SET tokens = EXCLUDED.tokens, at = EXCLUDED.at`)

	returnTokens = pg.Define(pg.RoleRecovery, "churn.return_tokens", `
		UPDATE recovery.churn_bucket SET tokens = tokens + 1 WHERE (scope = $1 AND key = $2) OR (scope = $3 AND key = $4)`)
)

var bucketsSQL = `
	SELECT ` + pg.Columns[bucket]("b") + ` FROM recovery.churn_bucket b
	WHERE (b.scope = '` + ScopePlacement + `' AND b.key = ANY($1::text[]))
		OR (b.scope = '` + ScopeWorkspace + `' AND b.key = ANY($2::text[]))
	ORDER BY b.scope, b.key`

// Budgets are the buckets of targets, as a round changes them.
type Budgets struct {
	now     time.Time
	of      map[key]*bucket // without those that have no row
	changed map[key]*bucket
}

// Read returns the buckets of targets. With lock it locks their rows, without which the caller must not write.
func Read(ctx context.Context, tx pgx.Tx, now time.Time, lock bool, targets []Target) (*Budgets, error) {
	workspaces, placements := make([]string, len(targets)), map[string]bool{}
	for i, t := range targets {
		workspaces[i], placements[t.Placement] = t.WorkspaceID, true
	}
	statement := readBuckets
	if lock {
		statement = lockBuckets
	}
	rows, err := pg.All[bucket](ctx, tx, statement, slices.Sorted(maps.Keys(placements)), workspaces)
	if err != nil {
		return nil, fmt.Errorf("look into budgets: %w", err)
	}
	b := &Budgets{now: now, of: make(map[key]*bucket, len(rows)), changed: map[key]*bucket{}}
	for i := range rows {
		b.of[key{rows[i].Scope, rows[i].Key}] = &rows[i]
	}
	return b, nil
}

// Wait returns the budget that a recreation of a target has to wait for; nil if both have a token.
func (b *Budgets) Wait(t Target, rate Rate) *Wait {
	var longest *Wait
	for _, of := range t.keys(rate) {
		tokens := b.level(of.key, of.rate)
		if tokens >= 1 {
			continue
		}
		missing := time.Duration((1 - tokens) / of.rate * float64(time.Hour))
		until := b.now.Add(missing).Add(time.Millisecond).Round(time.Millisecond)
		if longest == nil || until.After(longest.Until) {
			longest = &Wait{key: of.key, rate: of.rate, Until: until}
		}
	}
	return longest
}

// Take takes a token from both buckets of a target.
func (b *Budgets) Take(t Target, rate Rate) {
	for _, of := range t.keys(rate) {
		left := &bucket{Scope: of.scope, Key: of.id, Tokens: b.level(of.key, of.rate) - 1, At: b.now}
		b.of[of.key], b.changed[of.key] = left, left
	}
}

// GiveBack returns the tokens of a recreation that did not happen. A surplus is cut off when the bucket is next read.
func (b *Budgets) GiveBack(t Target) {
	for _, of := range t.keys(Rate{}) {
		if was := b.of[of.key]; was != nil {
			was.Tokens++
			b.changed[of.key] = was
		}
	}
}

// Save writes the buckets that have changed.
func (b *Budgets) Save(ctx context.Context, tx pgx.Tx) error {
	if len(b.changed) == 0 {
		return nil
	}
	var scopes, keys []string
	var tokens []float64
	var times []time.Time
	for of, c := range b.changed {
		scopes, keys, tokens, times = append(scopes, of.scope), append(keys, of.id), append(tokens, c.Tokens),
			append(times, c.At)
	}
	if _, err := pg.Exec(ctx, tx, setBuckets, scopes, keys, tokens, times); err != nil {
		return fmt.Errorf("write budgets: %w", err)
	}
	return nil
}

// GiveBack returns the tokens of a recreation that did not happen, outside of a round. The row of the record of the
// target must be locked.
func GiveBack(ctx context.Context, tx pgx.Tx, t Target) error {
	_, err := pg.Exec(ctx, tx, returnTokens, ScopePlacement, t.Placement, ScopeWorkspace, t.WorkspaceID)
	if err != nil {
		return fmt.Errorf("give back to budget: %w", err)
	}
	return nil
}

// rated is a bucket with the rate at which it refills.
type rated struct {
	key
	rate float64
}

// keys returns the buckets of a target.
func (t Target) keys(rate Rate) [2]rated {
	return [2]rated{
		{key{ScopePlacement, t.Placement}, rate.Placement}, {key{ScopeWorkspace, t.WorkspaceID}, rate.Workspace},
	}
}

// level returns the tokens of a bucket now. One that has no row is full, since nothing was taken from it.
func (b *Budgets) level(of key, rate float64) float64 {
	if was := b.of[of]; was != nil {
		return level(was.Tokens, rate, b.now.Sub(was.At))
	}
	return rate
}
