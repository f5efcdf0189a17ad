package events

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/gpuaas/mesh/internal/pg"
)

// stored is a row of the log. Its position is in events.numbered.
type stored struct {
	Seq int64 `db:"seq"`
	Record
}

// numberRange is a row of events.numbered, and the highest position of all.
type numberRange struct {
	FirstPos int64                                  `db:"first_pos"`
	Seqs     pgtype.Multirange[pgtype.Range[int64]] `db:"seqs"`
	Horizon  int64                                  `db:"horizon" expr:"(SELECT max(last_pos) FROM events.numbered)"`
}

var (
	readHorizon = pg.DefineShared(readers, "events.read_horizon", `SELECT COALESCE(max(last_pos), 0) FROM events.numbered`)

	countBetween = pg.DefineShared(writers, "events.count_between", `
		SELECT $1::bigint = 0
				OR COALESCE((SELECT n.first_pos <= $1 FROM events.numbered n WHERE n.last_pos >= $1 ORDER BY n.last_pos
					LIMIT 1), false) AS known,
			LEAST($3::bigint, COALESCE((SELECT sum(LEAST(n.last_pos, $2) - GREATEST(n.first_pos - 1, $1)) FROM (
				SELECT x.first_pos, x.last_pos FROM events.numbered x WHERE x.last_pos > $1 ORDER BY x.last_pos LIMIT $3) n
				WHERE n.first_pos <= $2), 0))::bigint AS count`)

	rangesAfter = pg.DefineShared(writers, "events.ranges_after", `
		SELECT `+pg.Columns[numberRange]("n")+`
		FROM (SELECT x.first_pos, x.last_pos, x.seqs,
				sum(x.last_pos - GREATEST(x.first_pos - 1, $1)) OVER (ORDER BY x.last_pos ROWS BETWEEN UNBOUNDED PRECEDING
					AND 1 PRECEDING) AS before
			FROM (SELECT first_pos, last_pos, seqs FROM events.numbered WHERE last_pos > $1 ORDER BY last_pos LIMIT $2) x) n
		WHERE COALESCE(n.before, 0) < $2
		ORDER BY n.last_pos`)

	// The bounds of a list let Postgres skip the partitions that have none of its events, which the list alone does not.
	fetchListed = pg.DefineShared(writers, "events.fetch_listed",
		fetchSQL+`e.seq BETWEEN $1 AND $2 AND e.seq = ANY($3)`)
	fetchListedOfKinds = pg.DefineShared(writers, "events.fetch_listed_of_kinds",
		fetchSQL+`e.seq BETWEEN $1 AND $2 AND e.seq = ANY($3) AND e.kind = ANY($4)`)
	fetchBetween        = pg.DefineShared(writers, "events.fetch_between", fetchSQL+`e.seq BETWEEN $1 AND $2`)
	fetchBetweenOfKinds = pg.DefineShared(writers, "events.fetch_between_of_kinds",
		fetchSQL+`e.seq BETWEEN $1 AND $2 AND e.kind = ANY($3)`)
)

var fetchSQL = `SELECT ` + pg.Columns[stored]("e") + ` FROM events.event e WHERE `

// mostExamined bounds the positions that one statement of Read examines if few events are of the wanted kinds.
const mostExamined = 4000

// Horizon returns the highest position given so far, zero in an empty log.
func Horizon(ctx context.Context, q pg.Querier) (int64, error) {
	pos, err := pg.Value[int64](ctx, q, readHorizon)
	if err != nil {
		return 0, fmt.Errorf("read event horizon: %w", err)
	}
	return pos, nil
}

// Read returns up to limit events after a position, in order, of the given kinds (all if none are given), and the
// position to read on from, which passes over events of other kinds. At the end of the log it equals the horizon.
func Read(ctx context.Context, q pg.Querier, after int64, kinds []string, limit int) ([]Record, int64, error) {
	var records []Record
	for span := limit; ; span = max(limit, min(4*span, mostExamined)) {
		// The numbers are read first: the events of all numbers that this statement sees are visible to every later
		// statement.
		part, err := numbersAfter(ctx, q, after, span)
		if err != nil {
			return nil, after, err
		}
		if len(part.seqs) == 0 {
			return records, after, nil
		}
		found, err := fetch(ctx, q, part, kinds)
		if err != nil {
			return nil, after, err
		}
		if left := limit - len(records); len(found) >= left {
			records = append(records, found[:left]...)
			return records, records[limit-1].Pos, nil
		}
		records, after = append(records, found...), part.end
		if part.end == part.horizon {
			return records, after, nil
		}
	}
}

// At reads the event at a position.
func At(ctx context.Context, q pg.Querier, pos int64) (Record, error) {
	part, err := numbersAfter(ctx, q, pos-1, 1)
	if err != nil {
		return Record{}, fmt.Errorf("read event at %d: %w", pos, err)
	}
	found, err := fetch(ctx, q, part, nil)
	if err != nil {
		return Record{}, fmt.Errorf("read event at %d: %w", pos, err)
	}
	if len(found) == 0 || found[0].Pos != pos {
		return Record{}, fmt.Errorf("read event at %d: %w", pos, pgx.ErrNoRows)
	}
	return found[0], nil
}

// Between reports whether this log ever gave the position from, which a caller has brought (zero, before all, counts as
// given), and returns how many events there are above it and not above to, counted to most+1.
//
//nolint:nonamedreturns // says which is which
func Between(ctx context.Context, q pg.Querier, from, to int64, most int) (known bool, count int, err error) {
	found, err := pg.One[between](ctx, q, countBetween, from, to, int64(most)+1)
	if err != nil {
		return false, 0, fmt.Errorf("count events between positions: %w", err)
	}
	return found.Known, found.Count, nil
}

// between is what countBetween reads.
type between struct {
	Known bool `db:"known"`
	Count int  `db:"count"`
}

// numbers are consecutive positions and the seqs that have them.
type numbers struct {
	seqs         []int64
	positions    map[int64]int64 // by seq
	end, horizon int64           // the last of these positions, and of all in the log
}

// numbersAfter reads the first positions after a position, no more of them than most. Its cost is proportional to what
// it returns: rows of events.numbered are short, since neighbours in them share a range.
func numbersAfter(ctx context.Context, q pg.Querier, after int64, most int) (numbers, error) {
	part := numbers{end: after, horizon: after}
	ranges, err := pg.All[numberRange](ctx, q, rangesAfter, after, int64(most))
	if err != nil {
		return part, fmt.Errorf("read event numbers: %w", err)
	}
	part.positions = map[int64]int64{}
	for _, n := range ranges {
		pos := n.FirstPos
		part.horizon = n.Horizon
		for _, r := range n.Seqs {
			skip := min(max(after+1-pos, 0), r.Upper-r.Lower)
			pos += skip
			for seq := r.Lower + skip; seq < r.Upper && len(part.seqs) < most; seq++ {
				part.seqs = append(part.seqs, seq)
				part.positions[seq], part.end = pos, pos
				pos++
			}
		}
	}
	return part, nil
}

// fetch reads those of part's events that are of the given kinds, in the order of their positions.
func fetch(ctx context.Context, q pg.Querier, part numbers, kinds []string) ([]Record, error) {
	if len(part.seqs) == 0 {
		return nil, nil
	}
	lo, hi := slices.Min(part.seqs), slices.Max(part.seqs)
	all, ofKinds, args := fetchListed, fetchListedOfKinds, []any{lo, hi, part.seqs}
	// Most events have the order of their seqs and are adjacent: one index range scan replaces one index lookup for each.
	if hi-lo < 2*int64(len(part.seqs)) {
		all, ofKinds, args = fetchBetween, fetchBetweenOfKinds, []any{lo, hi}
	}
	if len(kinds) > 0 {
		all, args = ofKinds, append(args, kinds)
	}
	rows, err := pg.All[stored](ctx, q, all, args...)
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	records := make([]Record, 0, len(rows))
	for _, row := range rows {
		// else the range has an event with a position outside part, or with none yet
		if row.Pos = part.positions[row.Seq]; row.Pos != 0 {
			records = append(records, row.Record)
		}
	}
	slices.SortFunc(records, func(a, b Record) int { return cmp.Compare(a.Pos, b.Pos) })
	return records, nil
}
