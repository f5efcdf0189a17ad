package app

// WatchSignals lets tests send signals without a process.
var WatchSignals = watchSignals
