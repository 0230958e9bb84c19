"""Word pools that every generator draws from, and words that are made up."""

import random


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _lines(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split(":", 1) for pair in text.split())


NAMES = _split(
    "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Klara Leo Mira Nils Olga Paul Rosa "
    "Simon Tara Uma Viktor Wanda Xenia Yara Zoe Adam Bella Carl Dora Erik Fiona George Hanna "
    "Ivan Julia Kai Lena Marco Nora Oscar Petra Quinn Rita Sven Tom Ursula Vera Will Yusuf "
    "Zara Alice Bob Carol Dan Eva Frank Gina Henry Iris Jack Kate Lucas Maria Noah Olivia "
    "Peter Ruth Sam Tina Victor Amir Bianca Cyrus Diana Elias Farah Gustav Helena Ines Jamal "
    "Kenji Lucia Mateo Nadia Omar Priya Rafael Sofia Tariq Valeria Wei Ximena Yuki Zhen"
)
CITIES = _lines(
    "Paris, Rome, Berlin, Madrid, Tokyo, London, Vienna, Oslo, Cairo, Lima, Athens, Dublin, "
    "Lisbon, Prague, Warsaw, Helsinki, Budapest, Bern, Boston, Chicago, Denver, Seattle, "
    "Toronto, Sydney, Mumbai, Delhi, Seoul, Beijing, Shanghai, Nairobi, Lagos, Milan, Munich, "
    "Hamburg, Zurich, Geneva, Porto, Seville, Kyoto, Osaka, Hanoi, Manila, Jakarta, Bogota, "
    "Quito, Havana, Dallas, Austin, Miami, New York, San Francisco, Los Angeles, Cape Town, "
    "Hong Kong, Mexico City, Buenos Aires"
)
ANIMALS = _split(
    "dog cat horse cow sheep goat pig hen duck goose rabbit mouse fox wolf bear lion tiger "
    "zebra monkey owl eagle crow swan frog snake turtle whale shark salmon crab bee ant "
    "spider camel donkey deer otter seal penguin parrot"
)
FOODS = _split(
    "apple pear plum lemon orange banana cherry grape melon peach bread cheese butter rice "
    "pasta soup salad egg fish bean carrot onion potato tomato pepper garlic honey sugar salt "
    "milk tea coffee juice cake cookie pizza noodle yogurt mushroom pumpkin"
)
OBJECTS = _split(
    "table chair lamp book pen cup plate spoon knife fork box bag key lock door window clock "
    "phone radio mirror brush comb towel blanket pillow candle basket bottle bucket hammer "
    "nail rope ladder wheel bell drum flute guitar violin ring coin stamp letter map flag "
    "tent boat bicycle train kite ball doll puzzle camera hat coat shoe glove scarf button "
    "needle thread"
)
PLACES = _split(
    "garden kitchen harbour forest market school library station bridge castle tower village "
    "valley mountain island beach river lake field farm mill church museum theatre office "
    "workshop cellar attic street square park cave desert meadow orchard"
)
ADJECTIVES = _split(
    "old new small large red blue green yellow black white grey brown quiet loud fast slow "
    "warm cold bright dark heavy light soft hard clean dirty dry wet young tall short wide "
    "narrow strange simple round empty full broken wooden golden silver gentle proud clever "
    "lazy brave happy sad"
)
PAST_VERBS = _split(
    "found lost carried painted moved watched followed opened closed cleaned counted built "
    "bought sold borrowed returned repaired dropped lifted hid showed described remembered "
    "forgot liked needed guarded measured collected covered"
)
PREPOSITIONS = _split("near behind beside above below inside outside beyond before after")
ADVERBS = _split(
    "today yesterday slowly quickly quietly again often never always twice early late "
    "carefully happily together alone"
)
JOBS = _lines(
    "baker, pirate, teacher, doctor, gardener, sailor, painter, farmer, pilot, librarian, "
    "clockmaker, lighthouse keeper, astronaut, detective, carpenter, blacksmith, fisherman, "
    "shepherd, poet, postman, tailor, cook, knight, wizard, robot, train driver, beekeeper, "
    "chess master, mountain guide, ship captain, violin maker, park ranger"
)
PHRASES = _lines(
    "Ahoy!, Arr!, Have a good day., As you wish., At your service., Stay curious., Fair "
    "winds!, Good luck!, Cheers!, Beep boop., By the stars!, Bon appetit!, Safe travels!, "
    "Over and out., All aboard!, So it is written., Case closed., Onward!, Keep calm., Peace "
    "and honey."
)
COLOURS = _split("red blue green yellow black white orange purple pink brown grey silver")
DRINKS = _split("tea coffee milk water juice cocoa lemonade soup")
SPORTS = _split("football tennis chess rowing swimming running cycling skating boxing sailing")
INSTRUMENTS = _split("piano violin guitar flute drum trumpet harp cello organ banjo")
MONTHS = _split(
    "January February March April May June July August September October November December"
)
DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
LANGUAGES = _split(
    "French German Spanish Italian Greek Polish Dutch Danish Czech Turkish Arabic Hindi "
    "Korean Japanese Chinese Swedish Finnish Russian"
)
CURRENCIES = _split("USD EUR GBP JPY CHF SEK NOK CAD AUD INR")
CODEWORDS = _split(
    "amber basil cedar delta ember falcon garnet hazel indigo jasper kestrel lotus maple "
    "nectar onyx pepper quartz raven saffron tulip umber velvet willow yarrow zephyr anchor "
    "beacon cobalt dragon echo fjord glacier harvest ivory jungle karma lantern meteor nimbus "
    "orchid prism quiver ripple summit thunder urchin vortex walnut zenith atlas"
)
WEATHER = _split("sunny cloudy rainy windy snowy foggy stormy clear")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CAPITALS = _pairs(
    "France:Paris Italy:Rome Germany:Berlin Spain:Madrid Japan:Tokyo England:London "
    "Austria:Vienna Norway:Oslo Egypt:Cairo Peru:Lima Greece:Athens Ireland:Dublin "
    "Portugal:Lisbon Poland:Warsaw Finland:Helsinki Hungary:Budapest Switzerland:Bern "
    "Canada:Ottawa Australia:Canberra India:Delhi China:Beijing Kenya:Nairobi Vietnam:Hanoi "
    "Cuba:Havana Ecuador:Quito Sweden:Stockholm Denmark:Copenhagen Belgium:Brussels "
    "Russia:Moscow Turkey:Ankara Iran:Tehran Iraq:Baghdad Thailand:Bangkok Chile:Santiago "
    "Colombia:Bogota Indonesia:Jakarta Nepal:Kathmandu Morocco:Rabat Tunisia:Tunis "
    "Ghana:Accra"
)
OPPOSITES = _pairs(
    "hot:cold big:small old:young fast:slow light:dark wet:dry full:empty hard:soft "
    "loud:quiet rich:poor happy:sad high:low long:short early:late open:closed clean:dirty "
    "wide:narrow strong:weak up:down left:right day:night black:white love:hate first:last "
    "true:false thick:thin near:far deep:shallow brave:afraid sharp:blunt"
)
YOUNG = _pairs(
    "cat:kitten dog:puppy cow:calf horse:foal sheep:lamb pig:piglet goat:kid bear:cub "
    "hen:chick duck:duckling goose:gosling swan:cygnet deer:fawn frog:tadpole owl:owlet "
    "seal:pup"
)
SYMBOLS = _pairs(
    "hydrogen:H helium:He carbon:C nitrogen:N oxygen:O sodium:Na iron:Fe copper:Cu silver:Ag "
    "gold:Au lead:Pb tin:Sn zinc:Zn neon:Ne sulfur:S calcium:Ca"
)
LEGS = _pairs("dog:4 bird:2 spider:8 ant:6 horse:4 snake:0 bee:6 crab:10")

_ONSETS = _split(
    "b c d f g h j k l m n p r s t v w z br ch cl cr dr fl fr gl gr kr pl pr sh sk sl sp st "
    "tr th qu"
)
_VOWELS = _split("a e i o u a e i o ai ea ee ia ie io oa ou ei au")
_ENDS = (
    _split("b d f g k l m n p r s t x ck ft ld lt mp nd ng nk nt rd rk rn rt sh st th") + ("",) * 14
)


def invented(rng: random.Random) -> str:
    """A word that nobody has used before, so that copying is learnt and not the words."""
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3))]
    return "".join(parts) + rng.choice(_ENDS)


def name_like(rng: random.Random, pool: tuple[str, ...], share: float = 0.25) -> str:
    """A name of the pool, or an invented one."""
    return invented(rng).capitalize() if rng.random() < share else rng.choice(pool)
