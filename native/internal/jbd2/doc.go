// Package jbd2 is the room of the journal: transactions, commit, checkpoint.
//
// It is empty for now. The ext4 package funnels every metadata change through a
// handle (see ext4's journal.go), which is where this package will be plugged in.
package jbd2
