package view

import (
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

// A notification with values that this build does not know is shown without them, and each is reported.
func TestANotificationOfANewerBuildIsReported(t *testing.T) {
	aside := testkit.SetAside(t, "notification")
	shown := readNotification(notificationRow{
		Place:               list.Place{ID: ids.New()},
		notificationColumns: notificationColumns{Layer: "newer", Family: "newer", Event: "newer", Text: "a text"},
	})
	if shown.GetLayer() != 0 || shown.GetUserState() != 0 || shown.GetEvent() != 0 || shown.GetText() != "a text" {
		t.Errorf("it shows %v", shown)
	}
	if n := aside(); n != 3 {
		t.Errorf("%d reported", n)
	}
}
