"""What this machine tells about its owner: readers that turn it into `agent.owner.events`.

`agent.signals.watch.watch_signals` runs them all. Which source sees what:

  source        asks                              sees                               blind to
  ------------  --------------------------------  ---------------------------------  -----------------------------------
  evdev         /dev/input/event*, group `input`  keyboard, mouse, touch, pen        SSH, remote desktops
  gamepad       /dev/input/event* of joysticks    buttons and sticks                 controllers without an event file
  tty           atime of /dev/tty*, /dev/pts/*    consoles, terminals, SSH           the graphical desktop
  logind        system bus, IdleHint of seat0     desktops that set it               desktops that never set it
  inhibitors    system bus, ListInhibitors        films, calls, presentations        programs that ask nobody
  sleep         system bus, PrepareForSleep       suspend and resume
  wayland:UID   companion, ext-idle-notify-v1     KWin, Sway, wlroots, COSMIC, niri  GNOME; in version 1 films are input
  mutter:UID    companion, session bus            GNOME, X11 and Wayland             other desktops
  x11:UID       companion, MIT-SCREEN-SAVER       X11 desktops                       gamepads; not asked under Wayland
  screen:UID    companion, X11 properties         a window in full screen            Wayland, borderless windows
  desktop:UID   companion, session bus            GNOME, KDE, Xfce kept awake
  gamemode:UID  companion, session bus            games that use GameMode            other games
  battery       /sys/class/power_supply           a laptop on its battery            a UPS (deliberately)
  metered       system bus, NetworkManager        a network paid by volume           other network services
  local time    /etc/localtime or TZ              hours and days of the owner
  price         the configuration or a file       what electricity costs now
  session       all of the above                  a desktop whose input nobody sees

UID is the user in whose session `python -m agent.session_companion` runs: a
hardened system service sees neither X nor Wayland nor a session bus. Nobody
sees a virtual-reality headset's head movements; its controllers and its program
on the card are seen.

No reader keeps what was typed, clicked or shown: only that something happened, and when.
"""
