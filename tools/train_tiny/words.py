"""Word lists of the tiny-k2 data generator (standard library only).

The lists are short on purpose: every word that is used often becomes one
token of the 2,048-entry vocabulary.
"""

NAMES = """Mia Tom Ana Leo Zoe Max Ida Ben Eva Sam Lily Omar Nina Paul Rosa Ivan
Kate Hugo Maya Finn Clara Noah Alma Luca Greta Jonas Elena Oscar Freya Amir
Sofia Felix Hanna Pedro Yuki Dana Marco Olga Ravi Tess""".split()

ITEMS = """apples books cards pens shells coins stamps marbles cookies flowers
stickers pencils balls eggs pears plums candles beads buttons muffins lemons
oranges tickets stones cups plates ribbons photos toys""".split()

CONTAINERS = [("box", "boxes"), ("bag", "bags"), ("basket", "baskets"),
              ("jar", "jars"), ("shelf", "shelves"), ("crate", "crates"),
              ("tray", "trays"), ("drawer", "drawers")]

ADJECTIVES = """amber bold brave bright calm clever cold coral crimson dark deep
dry eager early fancy fast fierce gentle giant glad golden gray green happy
heavy hidden honest icy jolly keen kind large light little lone loud lucky
merry mild misty narrow noble old olive pale plain polite proud purple quick
quiet rapid rare round royal rusty scarlet sharp silent silver sleepy slow
small smooth soft solid spicy steady sweet swift tall tidy tiny violet warm
white wild wise young yellow""".split()

NOUNS = """anchor arrow badger bear beaver bell bridge canyon castle cedar cloud
comet crane crow deer desert dolphin dragon eagle falcon feather fern forest
fox garden glacier hammer harbor hawk heron horse island jaguar kite lake
lantern lion lizard maple marble meadow mirror moon moose mountain ocean orchid
otter owl panda parrot pebble pine planet prairie rabbit raven river robin
rocket salmon shadow sparrow spider star stone storm sun swan temple thunder
tiger tower trout tulip turtle valley walrus whale willow wolf zebra""".split()

CITIES = """Paris London Berlin Madrid Rome Oslo Vienna Prague Lisbon Athens
Dublin Cairo Tokyo Seoul Delhi Lima Quito Boston Denver Dallas Milan Porto
Geneva Zurich Helsinki Warsaw Nairobi Hanoi Manila Sydney""".split()

MONTHS = """January February March April May June July August September October
November December""".split()

CURRENCIES = ["USD", "EUR", "GBP", "JPY", "CHF", "SEK"]
COLORS = "red blue green yellow purple orange white black".split()
SONGS = "Sunrise Horizon Echoes Gravity Moonlight Avalanche Rainfall Wildfire".split()
WEATHER = "sunny cloudy rainy windy snowy foggy".split()
VERBS = """find check open close update delete create start stop track scan count
sort move print load""".split()
THINGS = """order invoice report ticket folder server camera door parcel booking
lamp printer sensor account route budget""".split()

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"


def pseudo_word(rng):
    """A made-up word such as 'zorvik': copying it cannot be memorised."""
    out = ""
    for _ in range(rng.randint(2, 3)):
        out += rng.choice(CONSONANTS) + rng.choice(VOWELS)
    return out + rng.choice(["", "n", "r", "k", "s"])
