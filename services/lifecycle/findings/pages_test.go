package findings

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
)

// TestPagesHaveEveryID: pages follow each other from the lowest id to the highest, so that what belongs to a workspace
// whose own row is missing is in one too.
func TestPagesHaveEveryID(t *testing.T) {
	b := newBed(t, Config{Page: 2})
	for i := range 5 {
		b.live(fmt.Sprintf("w%d", i))
	}
	var bounds []string
	rows := 0
	err := b.sweeper.pages.Each(t.Context(), "workspace", func(ctx context.Context, after, upTo string) error {
		var n int
		err := b.db.OwnerPool().QueryRow(ctx, `SELECT count(*) FROM lifecycle.workspace w WHERE w.id > $1 AND w.id <= $2`,
			after, upTo).Scan(&n)
		if n > 2 {
			t.Errorf("a page of 2 has %d workspaces", n)
		}
		rows += n
		bounds = append(bounds, after, upTo)
		return err
	})
	if err != nil || rows != 5 {
		t.Fatalf("the pages have %d workspaces of 5 (%v)", rows, err)
	}
	if bounds[0] != scan.BeforeIDs || bounds[len(bounds)-1] != scan.LastID {
		t.Errorf("the pages are from %s to %s", bounds[0], bounds[len(bounds)-1])
	}
	for page := range slices.Chunk(bounds[1:len(bounds)-1], 2) {
		if page[0] != page[1] {
			t.Errorf("a page ends with %s, and the next is above %s", page[0], page[1])
		}
	}
}

// TestChecksThatFollowShareTheEndsOfPages checks that the checks of a sweep do not each query the ends of the same
// pages, that a row inserted since is in a page too, and that the ends are queried again later.
func TestChecksThatFollowShareTheEndsOfPages(t *testing.T) {
	b := newBed(t, Config{Page: 1})
	walk := func(want int) []string {
		t.Helper()
		var ends []string
		rows := 0
		err := b.sweeper.pages.Each(t.Context(), "workspace", func(ctx context.Context, after, upTo string) error {
			var n int
			err := b.db.OwnerPool().QueryRow(ctx, `SELECT count(*) FROM lifecycle.workspace w WHERE w.id > $1 AND w.id <= $2`,
				after, upTo).Scan(&n)
			rows, ends = rows+n, append(ends, upTo)
			return err
		})
		if err != nil || rows != want {
			t.Fatalf("the pages have %d workspaces of %d (%v)", rows, want, err)
		}
		return ends
	}
	b.live("one")
	first := walk(1)
	b.live("two")
	b.sweeper.pages.For = time.Hour // however long that took
	if second := walk(2); !slices.Equal(first, second) {
		t.Errorf("a check right after another found the ends of pages anew: %v, then %v", first, second)
	}
	b.sweeper.pages.For = 0
	if later := walk(2); slices.Equal(first, later) {
		t.Errorf("a later check has the ends of pages as they were: %v", later)
	}
}

// TestAPageThatFailsConcludesNothing: the findings of a check stay as they are unless all of its pages were read.
func TestAPageThatFailsConcludesNothing(t *testing.T) {
	b := newBed(t, Config{Page: 1})
	id := b.live("one")
	b.live("two")
	b.as(pg.RoleLifecycle, `DELETE FROM lifecycle.workspace_handle WHERE workspace_id = $1`, id)
	found := b.seen()
	if len(found) != 1 {
		t.Fatalf("%d findings are open, want the claim's alone", len(found))
	}
	broken := errors.New("the second page is not there")
	var swept Swept
	err := b.sweeper.check(t.Context(), detector{"records", func(ctx context.Context) ([]finding.Seen, error) {
		read := 0
		var out []finding.Seen
		err := b.sweeper.pages.Each(ctx, "workspace", func(context.Context, string, string) error {
			if read++; read == 2 {
				return broken
			}
			return nil
		})
		return out, err
	}}, []string{"rows"}, &swept)
	if !errors.Is(err, broken) || swept.Resolved != 0 || len(b.open()) != 1 {
		t.Errorf("%v: %d findings were resolved, %d are open", err, swept.Resolved, len(b.open()))
	}
}
