package identity

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

// opened is a row of session_open.
type opened struct {
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

	facts *recoveryv1.OpenSession `db:"-"`
}

// storedOpened is the row as it is stored.
type storedOpened struct {
	opened
	PutForText string `db:"put_for"`
	AnswerText string `db:"answer"`
}

func loadOpened(ctx context.Context, tx pgx.Tx, sessionIDs []string) (map[string]*opened, error) {
	rows, err := pg.All[storedOpened](ctx, tx, readOpened, sessionIDs)
	if err != nil {
		return nil, fmt.Errorf("read opened sessions: %w", err)
	}
	out := make(map[string]*opened, len(rows))
	for i := range rows {
		o := &rows[i].opened
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

func insertOpened(ctx context.Context, tx pgx.Tx, rows []*opened) error {
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
		f := o.facts
		for c, v := range []string{
			o.SessionID, o.NodeID, o.InstanceID, o.Verdict, o.Serial, names.OfSet(o.PutFor), o.ReplacesNonce, f.GetReplicaId(),
			cut(f.GetBootId()), cut(f.GetMachineId()), cut(f.GetRemoteAddress()), cut(f.GetAgentVersion()),
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

// cut truncates a text that an agent reports of its host, and drops characters that Postgres does not accept.
func cut(s string) string {
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

// raiseIssued writes issued generations alone. No consumer needs one until it is confirmed, so there is neither an
// event nor an authority number.
func raiseIssued(ctx context.Context, tx pgx.Tx, records map[string]*Record, keyID string) error {
	if len(records) == 0 {
		return nil
	}
	var nodeIDs []string
	var issued []int64
	for _, r := range records {
		nodeIDs, issued = append(nodeIDs, r.NodeID), append(issued, r.Issued)
	}
	tag, err := pg.Exec(ctx, tx, raiseGenerations, nodeIDs, issued, keyID)
	if err != nil {
		return fmt.Errorf("raise generations: %w", err)
	}
	if tag.RowsAffected() != int64(len(records)) {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "")
	}
	return nil
}
