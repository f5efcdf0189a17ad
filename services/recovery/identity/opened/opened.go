// Package opened has the rows of sessions that were opened: the verdict on each Hello, on what it rests, and the answer
// to a challenge.
//
// It keeps what package identity has decided, so that a repeated call is given the same answer, and decides nothing. A
// row whose texts this build does not know is read as unreadable, and alone.
package opened

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// Row is a row of session_open.
type Row struct {
	SessionID     string          `db:"session_id" expr:"@.session_id::text"`
	NodeID        string          `db:"node_id" expr:"@.node_id::text"`
	InstanceID    string          `db:"node_instance_id" expr:"@.node_instance_id::text"`
	Verdict       string          `db:"verdict"` // welcome or challenge
	Generation    int64           `db:"generation"`
	Era           int64           `db:"era"`
	Serial        string          `db:"serial"`
	PutFor        commonv1.Reason `db:"-"`
	FenceEpoch    int64           `db:"fence_epoch"`
	Answer        commonv1.Reason `db:"-"`
	ReplacesNonce string          `db:"replaces_nonce"`
	KeyID         string          `db:"key_id"` // the key that signed the join state
	Unreadable    bool            `db:"-"`      // this build does not know the reason of the challenge, or its answer

	// Facts are what the agent reported of its host.
	Facts *recoveryv1.OpenSession `db:"-"`
}

// stored is the row as it is stored.
type stored struct {
	Row

	PutForText string `db:"put_for"`
	AnswerText string `db:"answer"`
}

// Load returns those of the sessions that were opened, by id.
func Load(ctx context.Context, tx pgx.Tx, sessionIDs []string) (map[string]*Row, error) {
	rows, err := pg.All[stored](ctx, tx, readOpened, sessionIDs)
	if err != nil {
		return nil, fmt.Errorf("read opened sessions: %w", err)
	}
	out := make(map[string]*Row, len(rows))
	for i := range rows {
		o := &rows[i].Row
		var errPut, errAnswer error
		o.PutFor, errPut = parseReason(rows[i].PutForText)
		o.Answer, errAnswer = parseReason(rows[i].AnswerText)
		if err := errors.Join(errPut, errAnswer); err != nil {
			o.Unreadable = true
			aside.Note(ctx, "session", o.SessionID, err)
		}
		out[o.SessionID] = o
	}
	return out, nil
}

func parseReason(s string) (commonv1.Reason, error) {
	if s == "" {
		return commonv1.Reason_REASON_UNSPECIFIED, nil
	}
	r, err := names.Parse[commonv1.Reason](s)
	if err != nil {
		return r, fmt.Errorf("read opened session: %w", err)
	}
	return r, nil
}

// Insert writes the rows of sessions.
func Insert(ctx context.Context, tx pgx.Tx, rows []*Row) error {
	if len(rows) == 0 {
		return nil
	}
	n := len(rows)
	text := make([][]string, 12)
	for i := range text {
		text[i] = make([]string, n)
	}
	generations, eras, fences, keyIDs := make([]int64, n), make([]int64, n), make([]int64, n), make([]string, n)
	for i, o := range rows {
		f := o.Facts
		for c, v := range []string{
			o.SessionID, o.NodeID, o.InstanceID, o.Verdict, o.Serial, names.OfSet(o.PutFor), o.ReplacesNonce, f.GetReplicaId(),
			Cut(f.GetBootId()), Cut(f.GetMachineId()), Cut(f.GetRemoteAddress()), Cut(f.GetAgentVersion()),
		} {
			text[c][i] = v
		}
		keyIDs[i] = o.KeyID
		generations[i], eras[i], fences[i] = o.Generation, o.Era, o.FenceEpoch
	}
	_, err := pg.Exec(ctx, tx, insertSessions,
		text[0], text[1], text[2], text[3], text[4], text[5], text[6], text[7], text[8], text[9], text[10], text[11],
		generations, eras, fences, keyIDs)
	if err != nil {
		return fmt.Errorf("insert opened sessions: %w", err)
	}
	return nil
}

// Cut truncates a text that an agent reports of its host, and drops characters that Postgres does not accept.
func Cut(s string) string {
	const most = 128
	if len(s) > most {
		s = s[:most]
	}
	out := make([]rune, 0, len(s))
	for _, c := range s {
		if c != 0 && c != '\uFFFD' {
			out = append(out, c)
		}
	}
	return string(out)
}

// Answer records the answer to a challenge, unless there is one already: fault conflict.
func Answer(ctx context.Context, tx pgx.Tx, sessionID string, reason commonv1.Reason) error {
	tag, err := pg.Exec(ctx, tx, recordAnswer, sessionID, names.Of(reason))
	if err != nil {
		return fmt.Errorf("record answer: %w", err)
	}
	if tag.RowsAffected() != 1 {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "")
	}
	return nil
}
