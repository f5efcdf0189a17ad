package notify

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

type shown struct {
	ImpactID string    `db:"impact_id"`
	At       time.Time `db:"first_shown_at"`
}

// markShown notes when texts were first shown. A text that was replaced since it was read has not been shown.
var markShown = pg.Define(pg.RoleReadmodel, "notify.mark_shown", `
	UPDATE readmodel.notification n SET first_shown_at = mesh.clock()
	FROM unnest($2::uuid[], $3::timestamptz[]) u (impact_id, created_at)
	WHERE n.impact_id = u.impact_id AND n.audience = $1 AND n.created_at = u.created_at AND n.first_shown_at IS NULL
	RETURNING n.impact_id::text AS impact_id, n.first_shown_at`)

// Shown records that notifications are shown to a person of an audience for the first time, and sets it in them. It
// writes nothing if none is new.
func Shown(ctx context.Context, db pg.Querier, audience string, items []*readmodelv1.Notification) error {
	var ids []string
	var made []time.Time
	byID := map[string]*readmodelv1.Notification{}
	for _, n := range items {
		if n.GetFirstShownAt() == nil {
			byID[n.GetImpactId()] = n
			ids, made = append(ids, n.GetImpactId()), append(made, n.GetCreatedAt().AsTime())
		}
	}
	if len(ids) == 0 {
		return nil
	}
	rows, err := pg.All[shown](ctx, db, markShown, audience, ids, made)
	if err != nil {
		return fmt.Errorf("record what was shown: %w", err)
	}
	for _, row := range rows {
		byID[row.ImpactID].FirstShownAt = timestamppb.New(row.At)
	}
	return nil
}
