package retention

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// walkers are the roles whose services delete rows at the end of their retention.
var walkers = []string{pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}

// Account is the record of one cut of one service.
type Account struct {
	Service string     `db:"service"`
	Cut     string     `db:"cut"`
	Key     string     `db:"policy_key"`
	Total   int64      `db:"total"`
	Last    int64      `db:"last_cut"`
	BeganAt time.Time  `db:"began_at"`
	DoneAt  *time.Time `db:"done_at"`
	Oldest  *time.Time `db:"oldest_at"`
	Failure string     `db:"failure"`
	// Every is how often the service begins a walk; zero if that is not known.
	Every time.Duration `db:"every" expr:"coalesce(@.every, '0')"`
	// Lag is the time since the last completed walk ended, or since the first walk began if none has completed, by the
	// database's clock.
	Lag time.Duration `db:"lag" expr:"mesh.clock() - coalesce(@.done_at, @.first_at)"`
}

// forgotten is an account that was deleted.
type forgotten struct {
	Cut     string    `db:"cut"`
	Total   int64     `db:"total"`
	BeganAt time.Time `db:"began_at"`
}

// beginning is the time and the place at which a walk begins.
type beginning struct {
	At time.Time `db:"at"`
	// Place is the id after which the walk before this one was stopped; nil if it came to its end, or failed.
	Place *string `db:"place"`
}

var (
	readBeginning = pg.DefineShared(walkers, "retention.read_beginning", `
		SELECT mesh.clock() AS at,
			(SELECT r.place::text FROM mesh.retention r WHERE r.service = current_user::text AND r.cut = $1) AS place`)
	keepAccount = pg.DefineShared(walkers, "retention.keep_account", `
		INSERT INTO mesh.retention AS r (service, cut, policy_key, total, last_cut, began_at, done_at, oldest_at, failure,
			place, every)
		VALUES (current_user, $1, $2, $3, $3, $4, CASE WHEN $6 = '' THEN mesh.clock() END, $5, $6, $7::uuid, $8)
		ON CONFLICT (service, cut) DO UPDATE SET policy_key = EXCLUDED.policy_key, total = r.total + EXCLUDED.total,
			last_cut = EXCLUDED.last_cut, began_at = EXCLUDED.began_at, done_at = coalesce(EXCLUDED.done_at, r.done_at),
			oldest_at = EXCLUDED.oldest_at, failure = EXCLUDED.failure, place = EXCLUDED.place,
			every = EXCLUDED.every`)
	readRolledBack = pg.DefineShared(walkers, "retention.read_rolled_back", `SELECT mesh.rolled_back()`)
	// An account whose cut has deleted rows is late first: a replica may lack the configuration of that cut.
	forgetAccounts = pg.DefineShared(walkers, "retention.forget_accounts", `
		DELETE FROM mesh.retention r WHERE r.service = current_user::text AND r.cut <> ALL ($1::text[])
			AND r.began_at < mesh.clock() - CASE WHEN r.total > 0 THEN interval '30 days' ELSE interval '1 day' END
		RETURNING `+pg.Columns[forgotten]("r"))
	listAccounts = pg.Define(pg.RoleReadmodel, "retention.list_accounts", `
		SELECT `+pg.Columns[Account]("r")+` FROM mesh.retention r ORDER BY r.service, r.cut`)
)

// leastLate is the shortest lag that is late, however often walks begin.
const leastLate = time.Hour

// walksLate is how many walks in a row may be missing before a cut is late.
const walksLate = 3

// LateAfter returns the lag from which on the cut is late: an hour, or three of the service's own intervals if that is
// longer.
func (a Account) LateAfter() time.Duration { return max(leastLate, walksLate*a.Every) }

// Late reports whether the cut is late.
func (a Account) Late() bool { return a.Lag >= a.LateAfter() }

// Accounts returns the accounts of all services.
func Accounts(ctx context.Context, q pg.Querier) ([]Account, error) {
	list, err := pg.All[Account](ctx, q, listAccounts)
	if err != nil {
		return nil, fmt.Errorf("read accounts of retention: %w", err)
	}
	return list, nil
}
